// Blocks that a copy by others touches: which they are, and how long they stay.
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "memory_pieces_fixture.h"
#include "pool/pool.h"
#include "pool_fixture.h"
#include "transfer/held_blocks.h"

namespace kvelastic {
namespace {

Geometry two_slices() {
  Geometry geometry;
  geometry.pages = 3;
  geometry.extent_bytes = 1000;
  geometry.block_bytes = 100;
  geometry.blocks_per_page = 4;
  geometry.buffers_per_extent = 2;
  return geometry;
}

TEST(blocks_of_pieces_are_unique_and_sorted) {
  constexpr std::uint64_t kBase = 5000;
  // Page 1: blocks 10 to 13 in both slices, then 200 bytes of padding.
  const std::vector<Piece> pieces{{kBase + 1799, 1},
                                  {kBase + 1000, 101},
                                  {kBase + 1400, 1},
                                  {kBase + 2000, 0},
                                  {kBase + 399, 1}};
  auto ids = blocks_in(two_slices(), kBase, pieces);
  CHECK(ids && *ids == std::vector<BlockId>{3, 10, 11, 13});
  for (const Piece bad : {Piece{kBase + 1800, 1}, Piece{kBase + 1799, 2}, Piece{kBase - 1, 1},
                          Piece{kBase + 3000, 1}, Piece{kBase, ~std::uint64_t{0}}}) {
    CHECK(blocks_in(two_slices(), kBase, {&bad, 1}).error().code == Errc::kInvalidArgument);
  }
}

constexpr std::uint64_t kPage = HostDriver::kGranularityBytes;
constexpr std::uint64_t kBlocksPerPage = 8;
constexpr std::uint64_t kBlock = kPage / kBlocksPerPage;

/// A pool of four pages over memory of this process.
struct Held {
  std::shared_ptr<Range> range;
  std::shared_ptr<Pool> pool;

  Held() {
    const Geometry geometry = one_buffer(4, kBlocksPerPage);
    PoolOptions options;
    options.max_blocks = 4 * kBlocksPerPage;
    options.limit_bytes = options.capacity_bytes = 4 * kPage;
    options.preallocate = false;
    range = host_range(geometry);
    auto made = Pool::create(geometry, std::make_shared<LocalBacking>(range), options);
    REQUIRE(bool(made));
    pool = *std::move(made);
  }
  std::vector<BlockId> take(std::uint64_t count) const {
    auto ids = pool->allocator.alloc(count);
    return ids && ids->has_value() ? **ids : std::vector<BlockId>{};
  }
  std::vector<Piece> pieces_of(const std::vector<BlockId>& ids) const {
    std::vector<Piece> pieces;
    for (const BlockId id : ids) {
      pieces.push_back({address_of(range->address()) + static_cast<std::uint64_t>(id) * kBlock, 1});
    }
    return pieces;
  }
  Result<std::unique_ptr<HeldBlocks>> hold(const std::vector<BlockId>& ids) const {
    return HeldBlocks::hold(range, pool, pieces_of(ids));
  }
};

TEST(held_blocks_are_freed_after_release) {
  const Held one;
  const auto ids = one.take(3);
  auto held = one.hold({ids[2], ids[0], ids[2]});
  REQUIRE(bool(held));
  CHECK(bool(one.pool->allocator.free(ids)));
  CHECK(one.pool->state.stats().blocks_pinned == 2 && (*held)->is_whole());
  (*held)->release();
  CHECK(one.pool->state.stats().blocks_pinned == 0);
  (*held)->release();  // once is enough
  CHECK(bool(one.pool->check_integrity()));
}

TEST(held_blocks_are_released_with_their_holder) {
  const Held one;
  const auto ids = one.take(2);
  {
    auto held = one.hold(ids);
    CHECK(held && bool(one.pool->allocator.free(ids)) &&
          one.pool->state.stats().blocks_pinned == 2);
  }
  CHECK(one.pool->state.stats().blocks_pinned == 0);
}

TEST(blocks_not_in_use_cannot_be_held) {
  const Held one;
  const auto ids = one.take(2);
  CHECK(bool(one.pool->allocator.free({&ids[1], 1})));
  CHECK(one.hold(ids).error().code == Errc::kUnknownBlock);
  CHECK(one.hold({0}).error().code == Errc::kNullBlock);
  CHECK(one.pool->state.stats().blocks_pinned == 0 &&
        bool(one.pool->allocator.free({ids.data(), 1})));
}

TEST(hold_is_incomplete_after_pool_closes) {
  const Held one;
  const auto ids = one.take(2);
  auto held = one.hold(ids);
  CHECK(held && (*held)->is_whole());
  CHECK(bool(one.pool->close(true)));
  CHECK(!(*held)->is_whole());
  (*held)->release();
  CHECK(bool(one.pool->check_integrity()));
}

TEST(blocks_are_held_and_freed_concurrently) {
  const Held one;
  std::atomic<int> held_so_far{0};
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int round = 0; round < 200; ++round) {
      const auto ids = one.take(1 + random() % 6);
      if (ids.empty()) continue;
      auto held = one.hold(ids);
      REQUIRE(bool(held));
      CHECK(bool(one.pool->allocator.free(ids)));
      if (round % 3 == 0) CHECK(bool(one.pool->background.trim()));
      CHECK((*held)->is_whole());
      ++held_so_far;
    }
  };
  std::thread beside(work, 1);
  work(2);
  beside.join();
  CHECK(held_so_far > 0 && one.pool->state.stats().blocks_pinned == 0);
  CHECK(bool(one.pool->check_integrity()));
}

}  // namespace
}  // namespace kvelastic
