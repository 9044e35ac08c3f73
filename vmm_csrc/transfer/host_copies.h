// Copies within this process's memory, with several threads if there is enough to copy.
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

/// A copy of `bytes` bytes. Source and destination do not overlap.
struct MemoryCopy {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
};

/// One processor copies about 10 GB/s; a host tier's bus to a GPU carries five times that.
inline constexpr std::size_t kMostCopyThreads = 4;
/// Copying fewer bytes takes less time than starting a thread.
inline constexpr std::size_t kLeastBytesAThread = std::size_t{2} << 20;

/// The number of threads for a copy of `bytes`: at most half of the processors, because the engine
/// needs the others.
inline std::size_t copy_threads(std::size_t bytes, std::size_t processors) {
  return std::clamp<std::size_t>(std::min(bytes / kLeastBytesAThread, processors / 2), 1,
                                 kMostCopyThreads);
}

/// Copies the bytes [from, to) of the concatenated copies.
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

/// Makes all copies with `threads` threads, which copy parts of equal size. Blocks.
inline void copy_memory(std::span<const MemoryCopy> copies, std::size_t threads) {
  std::size_t bytes = 0;
  for (const MemoryCopy& copy : copies) bytes += copy.bytes;
  const std::size_t share = bytes / threads + 1;
  std::vector<std::jthread> others;  // joined in every case
  std::size_t begin = 0;
  try {
    for (; others.size() + 1 < threads; begin += share) {
      others.emplace_back([copies, begin, share] { copy_part(copies, begin, begin + share); });
    }
  } catch (const std::system_error&) {
    // The process cannot start another thread, so this one copies the rest.
  }
  copy_part(copies, begin, bytes);
}

}  // namespace kvelastic
