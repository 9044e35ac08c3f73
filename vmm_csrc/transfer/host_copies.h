// Copies within this process's memory, by several processors where there is enough to copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <system_error>
#include <thread>
#include <vector>

namespace kvelastic {

/// `bytes` from one place to another; the two do not overlap.
struct MemoryCopy {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
};

/// One processor copies some 10 GB/s, and a host tier's bus to a GPU has five times that.
inline constexpr std::size_t kMostCopyThreads = 4;
/// Less is copied before another thread has started.
inline constexpr std::size_t kLeastBytesAThread = std::size_t{2} << 20;

/// How many threads copy so many bytes: half of the processors at most, for the engine has work of
/// its own.
inline std::size_t copy_threads(std::size_t bytes, std::size_t processors) {
  return std::clamp<std::size_t>(std::min(bytes / kLeastBytesAThread, processors / 2), 1,
                                 kMostCopyThreads);
}

/// Copies the bytes [from, to) of all copies laid side by side.
inline void copy_part(std::span<const MemoryCopy> copies, std::size_t from, std::size_t to) {
  std::size_t begin = 0;
  for (const MemoryCopy& copy : copies) {
    const std::size_t first = std::max(begin, from);
    const std::size_t last = std::min(begin + copy.bytes, to);
    if (first < last) {
      std::memcpy(copy.to + (first - begin), copy.from + (first - begin), last - first);
    }
    begin += copy.bytes;
    if (begin >= to) return;
  }
}

/// Makes all copies, `threads` of them at a time by parts of equal size. Blocks.
inline void copy_memory(std::span<const MemoryCopy> copies, std::size_t threads) {
  std::size_t bytes = 0;
  for (const MemoryCopy& copy : copies) bytes += copy.bytes;
  const std::size_t share = bytes / threads + 1;
  std::vector<std::jthread> others;  // each is joined, however this ends
  std::size_t begin = 0;
  try {
    for (; others.size() + 1 < threads; begin += share) {
      others.emplace_back([copies, begin, share] { copy_part(copies, begin, begin + share); });
    }
  } catch (const std::system_error&) {
    // The process may start no more threads: this one copies what is left.
  }
  copy_part(copies, begin, bytes);
}

}  // namespace kvelastic
