// An array whose untouched parts use no memory.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/status.h"

namespace kvelastic {

/// `size` elements, initially zero bytes. The kernel provides the memory at the first touch. A
/// range over a tebibyte has half a million pages, of which few are ever mapped; allocating their
/// tables in advance would waste memory.
template <typename T>
class LazyArray {
  static_assert(std::is_trivially_copyable_v<T>, "elements start as zero bytes");

 public:
  LazyArray() = default;
  LazyArray(const LazyArray&) = delete;
  LazyArray& operator=(const LazyArray&) = delete;
  ~LazyArray() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }

  /// Pre: not allocated yet. Fails with kOutOfMemory if the address space is exhausted.
  Status allocate(std::size_t size) {
    const std::size_t bytes = (size == 0 ? 1 : size) * sizeof(T);
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
      return Error{Errc::kOutOfMemory,
                   "no room for a table of " + std::to_string(bytes) + " bytes"};
    }
    // A huge page would turn one touched entry into 2 MiB of memory.
    ::madvise(at, bytes, MADV_NOHUGEPAGE);
    data_ = static_cast<T*>(at);
    bytes_ = bytes;
    size_ = size;
    return ok();
  }

  /// Grows to at least `size` elements. Existing elements keep their values; new ones are zero
  /// bytes. The array may move. On kOutOfMemory nothing changes.
  Status grow(std::size_t size) {
    if (data_ == nullptr) return allocate(size);
    if (size <= size_) return ok();
    void* at = ::mremap(data_, bytes_, size * sizeof(T), MREMAP_MAYMOVE);
    if (at == MAP_FAILED) {
      return Error{Errc::kOutOfMemory,
                   "no room for a table of " + std::to_string(size * sizeof(T)) + " bytes"};
    }
    data_ = static_cast<T*>(at);
    bytes_ = size * sizeof(T);
    size_ = size;
    return ok();
  }

  void swap(LazyArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(size_, other.size_);
  }

  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  std::size_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t size_ = 0;
};

}  // namespace kvelastic
