#include "pages/staging.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/huge_pages.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;

Error failed(const std::string& what) {
  return {Errc::kMapping, what + " failed: " + std::strerror(errno)};
}

}  // namespace

Status Staging::check(std::uint64_t slots, std::uint64_t record_bytes) {
  if (slots == 0 || record_bytes == 0 || record_bytes > kMostBytes ||
      slots > kMostBytes / slot_bytes(record_bytes)) {
    return Error{Errc::kInvalidArgument,
                 "a staging of " + std::to_string(slots) + " slots for records of " +
                     std::to_string(record_bytes) +
                     " bytes; give at least one of each, 2^46 bytes in all"};
  }
  return ok();
}

Result<std::unique_ptr<Staging>> Staging::create(std::uint64_t slots, std::uint64_t record_bytes) {
  if (Status sound = check(slots, record_bytes); !sound) return sound.error();
  const int fd = ::memfd_create("kvelastic-staging", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return failed("memfd_create (the limit on open files may be reached: ulimit -n)");
  const auto bytes = static_cast<off_t>(slots * slot_bytes(record_bytes));
  // Sealed so that a process that maps it cannot shrink it and crash the others.
  if (::ftruncate(fd, bytes) != 0 ||
      ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const Error error = failed("sizing a staging of " + std::to_string(bytes) + " bytes");
    ::close(fd);
    return error;
  }
  return map(fd, slots, record_bytes);
}

Result<std::unique_ptr<Staging>> Staging::attach(const StagingName& name) {
  if (Status sound = check(name.slots, name.record_bytes); !sound) return sound.error();
  const std::string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return failed("opening the staging of process " + std::to_string(name.pid));
  struct stat facts{};
  const std::uint64_t bytes = name.slots * slot_bytes(name.record_bytes);
  if (::fstat(fd, &facts) != 0 || static_cast<std::uint64_t>(facts.st_size) != bytes ||
      (::fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) == 0) {
    ::close(fd);
    return Error{Errc::kMapping, path + " is no staging of " + std::to_string(bytes) +
                                     " bytes: the process that made it may have ended"};
  }
  return map(fd, name.slots, name.record_bytes);
}

Result<std::unique_ptr<Staging>> Staging::map(int fd, std::uint64_t slots,
                                              std::uint64_t record_bytes) {
  const std::uint64_t bytes = slots * slot_bytes(record_bytes);
  AlignedAddresses addresses(bytes);  // as huge pages need them
  void* at = addresses.get();
  if (at == nullptr ||
      ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const Error error = failed("mapping a staging of " + std::to_string(bytes) + " bytes");
    ::close(fd);
    return error;
  }
  // A forked child of an engine does not need the mapping.
  (void)::madvise(at, bytes, MADV_DONTFORK);
  return std::unique_ptr<Staging>(new Staging(fd, addresses.keep(), slots, record_bytes));
}

Staging::~Staging() {
  if (made_by_.is_this()) ::munmap(address_, slots_ * slot_bytes_);
  ::close(fd_);
}

StagingName Staging::name() const {
  return {static_cast<std::uint64_t>(::getpid()), static_cast<std::uint64_t>(fd_), slots_,
          record_bytes_};
}

}  // namespace kvelastic
