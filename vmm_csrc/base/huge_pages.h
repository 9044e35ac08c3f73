// Huge pages of 2 MiB: addresses that can have them, and memory that is allocated in them.
#pragma once

#include <cstddef>
#include <span>

namespace kvelastic {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

/// Maps inaccessible addresses without memory; `at` may be null for any address.
void* map_nothing(void* at, std::size_t bytes);

/// `bytes` of inaccessible addresses aligned to a huge page, unmapped again on destruction.
/// Pre: `bytes` is a multiple of the system page.
class AlignedAddresses {
 public:
  explicit AlignedAddresses(std::size_t bytes);
  AlignedAddresses(const AlignedAddresses&) = delete;
  AlignedAddresses& operator=(const AlignedAddresses&) = delete;
  ~AlignedAddresses();

  /// The first address; null with errno if there are none.
  std::byte* get() const { return address_; }
  /// Leaves the addresses to the caller.
  std::byte* keep();

 private:
  std::byte* address_ = nullptr;
  std::size_t bytes_;
};

/// `error` is an errno, 0 for success.
struct Populated {
  int error;
  bool is_huge;
};

/// Allocates all memory of a shared mapping, in huge pages if the kernel has them; what does not
/// fill a huge page at the end has system pages. Blocks: milliseconds on an idle machine, longer on
/// a busy one. Pre: addresses and offset in the file are multiples of a huge page.
Populated populate(std::span<std::byte> memory);

}  // namespace kvelastic
