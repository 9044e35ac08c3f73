// Copies of pieces: by one thread and by two, and of a range whose pages come and go.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "memory_pieces_fixture.h"
#include "pool_fixture.h"
#include "transfer/process_copy.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kPage = HostDriver::kGranularityBytes;

TEST(pieces_are_copied_completely_for_all_sizes) {
  // Below and above what a second thread begins at.
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{70'001}, std::size_t{9} << 20}) {
    const auto theirs = noise(bytes, 1);
    std::vector<std::byte> ours(bytes);
    const auto from = cut(theirs, 40'000, 2), to = cut(ours, 90'000, 3);
    CHECK(bool(read_from_process(::getpid(), from, to, soon())));
    CHECK(ours == theirs);
  }
}

TEST(mismatched_or_overflowing_pieces_are_refused) {
  std::vector<std::byte> memory(100);
  const std::vector<Piece> whole{{address_of(memory.data()), 100}};
  const std::vector<Piece> part{{address_of(memory.data()), 99}};
  const std::vector<Piece> beyond{{~std::uint64_t{0}, 2}};
  CHECK(read_from_process(::getpid(), whole, part, soon()).error().code == Errc::kInvalidArgument);
  CHECK(read_from_process(::getpid(), beyond, whole, soon()).error().code ==
        Errc::kInvalidArgument);
  CHECK(read_from_process(::getpid(), whole, whole, {}).error().code == Errc::kChannelTimeout);
}

TEST(copied_pieces_match_their_page_generation) {
  constexpr std::uint64_t kPages = 6;
  const std::shared_ptr<Range> range = host_range(one_buffer(kPages, 1));
  const auto page_at = [&](PageIndex page) { return range->address() + page * kPage; };

  std::atomic<bool> is_over{false};
  // Each life of a page is filled with a number of its own before its generation is looked at.
  std::atomic<std::uint32_t> filled[kPages] = {};
  std::thread owner([&] {
    std::mt19937 random(7);
    for (int round = 0; round < 150; ++round) {
      const PageIndex page = random() % kPages;
      if (range->is_mapped(page)) {
        CHECK(bool(range->unmap_idle(std::vector{page}, Afterwards::kRecycle)));
      } else {
        CHECK(bool(range->map(std::vector{page})));
        // By the system, as a transfer does it: the reader is another process there.
        const auto life = static_cast<std::byte>(range->generation(page));
        const std::vector<std::byte> content(kPage, life);
        const std::vector<Piece> from{{address_of(content.data()), kPage}};
        const std::vector<Piece> to{{address_of(page_at(page)), kPage}};
        CHECK(bool(read_from_process(::getpid(), from, to, soon())));
        filled[page] = range->generation(page) + 1;
      }
    }
    is_over = true;
  });
  std::mt19937 random(8);
  std::vector<std::byte> ours(kPage);
  const std::vector<Piece> to{{address_of(ours.data()), kPage}};
  while (!is_over) {
    const PageIndex page = random() % kPages;
    const std::uint32_t life = range->generation(page);
    if (!range->is_mapped(page) || filled[page] != life + 1) continue;
    const std::vector<Piece> from{{address_of(page_at(page)), kPage}};
    const Status read = read_from_process(::getpid(), from, to, soon());
    if (!read) {
      CHECK(read.error().code == Errc::kMapping);
    } else if (range->is_mapped(page) && range->generation(page) == life) {
      const std::vector<std::byte> expected(kPage, static_cast<std::byte>(life));
      CHECK(ours == expected);
    }
  }
  owner.join();
  CHECK(bool(range->check_integrity()));
}

}  // namespace
}  // namespace kvelastic
