#include "base/huge_pages.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <utility>

// Older C libraries lack these constants; the kernel's numbers are fixed.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace kvelastic {
namespace {

constexpr std::size_t kSystemPageBytes = 4096;

}  // namespace

void* map_nothing(void* at, std::size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at != nullptr ? MAP_FIXED : 0);
  return ::mmap(at, bytes, PROT_NONE, flags, -1, 0);
}

AlignedAddresses::AlignedAddresses(std::size_t bytes) : bytes_(bytes) {
  // Allocate one huge page too many, then unmap what lies outside the aligned part.
  void* raw = map_nothing(nullptr, bytes + kHugePageBytes);
  if (raw == MAP_FAILED) return;
  auto* begin = static_cast<std::byte*>(raw);
  const auto misaligned = reinterpret_cast<std::uintptr_t>(begin) % kHugePageBytes;
  const std::size_t head = misaligned == 0 ? 0 : kHugePageBytes - misaligned;
  address_ = begin + head;
  if (head > 0) ::munmap(begin, head);
  ::munmap(address_ + bytes, kHugePageBytes - head);
}

AlignedAddresses::~AlignedAddresses() {
  if (address_ != nullptr) ::munmap(address_, bytes_);
}

std::byte* AlignedAddresses::keep() {
  return std::exchange(address_, nullptr);
}

// MADV_COLLAPSE fails with EINVAL if there is no page table yet, so each huge page is populated
// with one system page first. MADV_POPULATE_WRITE returns an error when memory runs out; a store
// would raise SIGBUS.
Populated populate(std::span<std::byte> memory) {
  std::byte* at = memory.data();
  for (std::size_t done = 0; done < memory.size(); done += kHugePageBytes) {
    if (::madvise(at + done, kSystemPageBytes, MADV_POPULATE_WRITE) != 0) return {errno, false};
  }
  // One call for all huge pages: each call waits for a kernel worker on every processor, which
  // takes long while an engine keeps the processors busy.
  const std::size_t whole = memory.size() / kHugePageBytes * kHugePageBytes;
  const bool is_huge = whole > 0 && ::madvise(at, whole, MADV_COLLAPSE) == 0;
  const std::size_t done = is_huge ? whole : 0;
  if (done < memory.size() &&
      ::madvise(at + done, memory.size() - done, MADV_POPULATE_WRITE) != 0) {
    return {errno, false};
  }
  return {0, is_huge};
}

}  // namespace kvelastic
