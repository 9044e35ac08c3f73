#include "driver/host_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "base/huge_pages.h"

namespace kvelastic {
namespace {

constexpr std::size_t kHuge = HostDriver::kGranularityBytes;
/// More than any processor can address, so sums of two sizes cannot overflow.
constexpr std::size_t kMaxBytes = std::size_t{1} << 57;

std::string describe(const char* call, std::size_t bytes, int error) {
  return std::string(call) + " of " + std::to_string(bytes) +
         " bytes failed: " + std::strerror(error);
}

bool fits_granularity(std::size_t bytes) {
  return bytes > 0 && bytes <= kMaxBytes && bytes % kHuge == 0;
}

Error bad_size(const char* call, std::size_t bytes) {
  return {Errc::kInvalidArgument, std::string(call) + ": " + std::to_string(bytes) +
                                      " bytes is not a positive multiple of " +
                                      std::to_string(kHuge) + ", at most 2^57"};
}

}  // namespace

Result<std::unique_ptr<HostDriver>> HostDriver::open() {
  const int fd = ::memfd_create("kvelastic", MFD_CLOEXEC);
  if (fd < 0) {
    return Error{Errc::kMapping, std::string("memfd_create failed: ") + std::strerror(errno) +
                                     "; the limit on open files (ulimit -n) may be reached"};
  }
  return std::unique_ptr<HostDriver>(new HostDriver(fd));
}

HostDriver::HostDriver(int memfd) : memfd_(memfd) {}

HostDriver::~HostDriver() {
  ::close(memfd_);
}

Result<std::byte*> HostDriver::reserve(std::size_t bytes) {
  if (!fits_granularity(bytes)) return bad_size("reserve", bytes);
  AlignedAddresses addresses(bytes);
  if (addresses.get() == nullptr) {
    return Error{Errc::kMapping, describe("reserving addresses", bytes, errno) +
                                     "; check ulimit -v and vm.overcommit_memory"};
  }
  return addresses.keep();
}

Status HostDriver::release(std::byte* address, std::size_t bytes) {
  if (::munmap(address, bytes) != 0) {
    return Error{Errc::kMapping, describe("releasing addresses", bytes, errno)};
  }
  return ok();
}

Result<Handle> HostDriver::create(std::size_t bytes) {
  if (!fits_granularity(bytes)) return bad_size("create", bytes);
  if (Status mine = opened_by_.refuse_in_a_child(); !mine) return mine.error();
  if (Status there = left_.refuse_if_tight(bytes); !there) return there.error();
  Result<std::uint64_t> offset = take_offset(bytes);
  if (!offset) return offset.error();
  if (Status filled = populate(*offset, bytes); !filled) {
    // Returns the populated part to the kernel. If punching fails, that happens later.
    (void)punch(*offset, bytes);
    put_offset(*offset, bytes);
    return filled.error();
  }
  creates_.fetch_add(1, std::memory_order_relaxed);
  return Handle{*offset};
}

Status HostDriver::destroy(Handle handle, std::size_t bytes) {
  if (Status mine = opened_by_.refuse_in_a_child(); !mine) return mine;
  if (Status punched = punch(handle, bytes); !punched) return punched;
  put_offset(handle, bytes);
  destroys_.fetch_add(1, std::memory_order_relaxed);
  return ok();
}

Status HostDriver::map(std::byte* address, std::size_t bytes, Handle handle) {
  void* at = ::mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd_,
                    static_cast<off_t>(handle));
  if (at == MAP_FAILED) {
    return Error{Errc::kMapping,
                 describe("mapping a page", bytes, errno) + "; vm.max_map_count may be reached"};
  }
  maps_.fetch_add(1, std::memory_order_relaxed);
  return ok();
}

Status HostDriver::set_access(std::byte*, std::size_t) {
  return ok();
}  // mmap already gave access

Status HostDriver::unmap(std::byte* address, std::size_t bytes) {
  if (map_nothing(address, bytes) == MAP_FAILED) {
    return Error{Errc::kMapping, describe("unmapping", bytes, errno)};
  }
  unmaps_.fetch_add(1, std::memory_order_relaxed);
  return ok();
}

Status HostDriver::copy(std::span<const CopyRun> runs) {
  if (Status mine = opened_by_.refuse_in_a_child(); !mine) return mine;
  for (const CopyRun& run : runs) {
    for (std::size_t row = 0; row < run.rows; ++row) {
      std::memcpy(run.to + row * run.stride_bytes, run.from + row * run.stride_bytes,
                  run.row_bytes);
    }
  }
  return ok();
}

Status HostDriver::copy_host(std::span<const HostCopy> copies, CopyTo to) {
  if (Status mine = opened_by_.refuse_in_a_child(); !mine) return mine;
  for (const HostCopy& copy : copies) {
    for (std::size_t row = 0; row < copy.rows; ++row) {
      std::byte* here = copy.device + row * copy.stride_bytes;
      std::byte* there = copy.host + row * copy.row_bytes;
      std::memcpy(to == CopyTo::kHost ? there : here, to == CopyTo::kHost ? here : there,
                  copy.row_bytes);
    }
  }
  return ok();
}

DriverStats HostDriver::stats() const {
  return {creates_.load(), destroys_.load(), maps_.load(), unmaps_.load(), small_pages_.load()};
}

Result<std::uint64_t> HostDriver::take_offset(std::size_t bytes) {
  const std::lock_guard lock(offsets_mutex_);
  std::vector<std::uint64_t>& same_size = free_offsets_[bytes];
  if (!same_size.empty()) {
    const std::uint64_t offset = same_size.back();
    same_size.pop_back();
    return offset;
  }
  if (::ftruncate(memfd_, static_cast<off_t>(end_offset_ + bytes)) != 0) {
    return Error{Errc::kOutOfMemory, describe("growing the memfd by a page", bytes, errno)};
  }
  return std::exchange(end_offset_, end_offset_ + bytes);
}

void HostDriver::put_offset(std::uint64_t offset, std::size_t bytes) {
  const std::lock_guard lock(offsets_mutex_);
  free_offsets_[bytes].push_back(offset);
}

// Fills the file's page cache through a temporary mapping, so that the page is complete before any
// thread can address it.
Status HostDriver::populate(std::uint64_t offset, std::size_t bytes) {
  AlignedAddresses window(bytes);
  std::byte* at = window.get();
  if (at == nullptr || ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd_,
                              static_cast<off_t>(offset)) == MAP_FAILED) {
    return Error{Errc::kMapping, describe("mapping a new page", bytes, errno)};
  }
  const Populated populated = kvelastic::populate({at, bytes});
  if (populated.error != 0) {
    return Error{Errc::kOutOfMemory, describe("creating a page", bytes, populated.error) +
                                         "; lower KVELASTIC_HOST_MEMORY or the limits"};
  }
  small_pages_.fetch_add(!populated.is_huge, std::memory_order_relaxed);
  return ok();
}

Status HostDriver::punch(std::uint64_t offset, std::size_t bytes) {
  if (::fallocate(memfd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes)) != 0) {
    return Error{Errc::kMapping, describe("giving a page back", bytes, errno)};
  }
  return ok();
}

}  // namespace kvelastic
