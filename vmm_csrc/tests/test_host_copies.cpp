// Copies by one thread and by several: the same bytes at the same places, and no byte beside them.
#include <random>
#include <vector>

#include "check.h"
#include "transfer/host_copies.h"

namespace kvelastic {
namespace {

constexpr std::size_t kGap = 3;
constexpr std::byte kUntouched{0xee};

void compare(const std::vector<std::size_t>& sizes, std::size_t threads) {
  std::size_t total = 0;
  for (const std::size_t size : sizes) total += size + kGap;
  std::vector<std::byte> from(total);
  std::vector<std::byte> to(total, kUntouched);
  std::mt19937 random(7);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random() % 200);
  std::vector<MemoryCopy> copies;
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    copies.push_back({to.data() + at, from.data() + at, size});
    at += size + kGap;
  }
  copy_memory(copies, threads);
  at = 0;
  for (const std::size_t size : sizes) {
    for (std::size_t i = 0; i < size; ++i) CHECK(to[at + i] == from[at + i]);
    for (std::size_t i = size; i < size + kGap; ++i) CHECK(to[at + i] == kUntouched);
    at += size + kGap;
  }
}

TEST(host_copies_are_complete_with_any_thread_count) {
  for (std::size_t threads = 1; threads <= kMostCopyThreads; ++threads) {
    compare({}, threads);
    compare({0}, threads);
    compare({1}, threads);
    compare({2, 0, 3}, threads);
    compare({4096, 1, 65536, 7, 4096, 4096}, threads);
  }
}

TEST(host_copy_threads_grow_with_bytes_and_processors) {
  constexpr std::size_t kMib = std::size_t{1} << 20;
  CHECK(copy_threads(0, 16) == 1);
  CHECK(copy_threads(2 * kMib, 16) == 1);
  CHECK(copy_threads(4 * kMib, 16) == 2);
  CHECK(copy_threads(64 * kMib, 16) == kMostCopyThreads);
  CHECK(copy_threads(64 * kMib, 4) == 2);
  CHECK(copy_threads(64 * kMib, 2) == 1);
  CHECK(copy_threads(64 * kMib, 0) == 1);
}

}  // namespace
}  // namespace kvelastic
