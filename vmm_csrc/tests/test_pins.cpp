// Pinned blocks, in their accounting alone and in a pool over local memory.
#include <algorithm>
#include <vector>

#include "check.h"
#include "pool/accounting.h"
#include "pool/pool.h"
#include "pool_fixture.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kPage = HostDriver::kGranularityBytes;
constexpr std::uint64_t kPages = 4;
constexpr std::uint64_t kBlocksPerPage = 8;

Geometry geometry() {
  return one_buffer(kPages, kBlocksPerPage);
}

/// Two mapped pages, all their blocks used.
struct Full {
  std::unique_ptr<Blocks> made = *Blocks::create(geometry());
  Blocks& blocks = *made;
  std::vector<BlockId> ids;
  std::vector<EvictedBlock> evicted;

  Full() {
    for (int i = 0; i < 2; ++i) blocks.add_page(*blocks.take_unmapped());
    blocks.alloc(2 * kBlocksPerPage - 1, Blocks::Fit::kBest, ids);
  }
  ~Full() { CHECK(static_cast<bool>(blocks.check_integrity())); }
  std::span<const BlockId> first(std::size_t count) const { return std::span(ids).first(count); }
  PinTicket pin(std::size_t count, PinKind kind = PinKind::kStrict) {
    return *blocks.pin(first(count), kind);
  }
};

std::shared_ptr<Pool> make_pool() {
  PoolOptions o;
  o.max_blocks = kPages * kBlocksPerPage;
  o.limit_bytes = o.capacity_bytes = kPages * kPage;
  o.preallocate = false;
  o.movable = true;
  auto pool = Pool::create(geometry(), std::make_shared<LocalBacking>(host_range(geometry())), o);
  if (!pool) return nullptr;
  return *std::move(pool);
}

/// None where the pool has too few.
std::vector<BlockId> take(Pool& pool, std::uint64_t count, bool reuse = false) {
  Result<std::optional<std::vector<BlockId>>> ids = pool.allocator.alloc(count, reuse);
  if (!ids || !ids->has_value()) return {};
  return **ids;
}

}  // namespace

TEST(freed_pinned_block_is_free_after_last_unpin) {
  Full one;
  const PinTicket first = one.pin(2), second = one.pin(1);
  CHECK(static_cast<bool>(one.blocks.free(one.first(2))));
  CHECK(one.blocks.free_blocks() == 0 && one.blocks.waiting_blocks() == 2);
  CHECK(one.blocks.free(one.first(1)).error().code == Errc::kDoubleFree);
  CHECK(one.blocks.cache(one.first(1)).error().code == Errc::kDoubleFree);
  CHECK(one.blocks.touch(one.first(1)).error().code == Errc::kDoubleFree);
  CHECK(one.blocks.unpin(first));
  CHECK(one.blocks.free_blocks() == 1 && one.blocks.waiting_blocks() == 1);
  CHECK(!one.blocks.unpin(first));  // once
  CHECK(one.blocks.unpin(second));
  CHECK(one.blocks.free_blocks() == 2 && one.blocks.waiting_blocks() == 0);
  CHECK(one.blocks.pin(one.first(1), PinKind::kStrict).error().code == Errc::kUnknownBlock);
}

TEST(cached_pinned_block_can_be_touched_not_evicted) {
  Full one;
  const PinTicket ticket = one.pin(3);
  CHECK(static_cast<bool>(one.blocks.cache(one.first(3))));
  CHECK(one.blocks.cached_blocks() == 0 && !one.blocks.evict_oldest_block(one.evicted));
  CHECK(static_cast<bool>(one.blocks.touch(one.first(1))));
  CHECK(one.blocks.waiting_blocks() == 2);
  CHECK(one.blocks.unpin(ticket));
  CHECK(one.blocks.cached_blocks() == 2);
  CHECK(one.blocks.evict_oldest_block(one.evicted) && one.evicted[0].id == one.ids[1]);
}

TEST(pinned_cached_block_is_cached_after_unpin) {
  Full one;
  CHECK(static_cast<bool>(one.blocks.cache(one.first(2))));
  const PinTicket ticket = one.pin(2);
  CHECK(one.blocks.cached_blocks() == 0 && one.blocks.waiting_blocks() == 2);
  CHECK(static_cast<bool>(one.blocks.free(one.first(1))));
  CHECK(one.blocks.unpin(ticket));
  CHECK(one.blocks.cached_blocks() == 1 && one.blocks.free_blocks() == 1);
}

TEST(refused_call_leaves_pinned_blocks_unchanged) {
  Full one;
  const PinTicket ticket = one.pin(4);
  CHECK(static_cast<bool>(one.blocks.cache(one.first(2))));
  const std::vector<BlockId> twice = {one.ids[0], one.ids[1], one.ids[0]};
  CHECK(!one.blocks.touch(twice) && !one.blocks.free(twice));
  const std::vector<BlockId> used_twice = {one.ids[2], one.ids[3], one.ids[2]};
  CHECK(!one.blocks.cache(used_twice) && !one.blocks.free(used_twice));
  CHECK(one.blocks.waiting_blocks() == 2);
  const std::vector<BlockId> with_null = {one.ids[0], Blocks::kNullBlock};
  CHECK(one.blocks.pin(with_null, PinKind::kStrict).error().code == Errc::kNullBlock);
  CHECK(one.blocks.unpin(ticket) && one.blocks.cached_blocks() == 2);
}

TEST(ordered_pins_are_reused_before_fenced_never_strict) {
  Full one;
  const PinTicket strict = *one.blocks.pin(one.first(2), PinKind::kStrict);
  const PinTicket fenced = *one.blocks.pin(std::span(one.ids).subspan(1, 3), PinKind::kFenced);
  const PinTicket ordered = *one.blocks.pin(std::span(one.ids).subspan(3, 3), PinKind::kOrdered);
  // 0 strict, 1 strict and fenced, 2 fenced, 3 fenced and ordered, 4 and 5 ordered.
  CHECK(static_cast<bool>(one.blocks.cache(std::span(one.ids).subspan(4, 1))));
  CHECK(static_cast<bool>(one.blocks.free(one.first(4))));
  CHECK(static_cast<bool>(one.blocks.free(std::span(one.ids).subspan(5, 1))));
  CHECK(one.blocks.waiting_blocks() == 6 && one.blocks.reusable_blocks() == 4);
  std::vector<BlockId> got;
  one.blocks.reuse(3, got, one.evicted);
  CHECK((got == std::vector<BlockId>{one.ids[5], one.ids[4], one.ids[2]}));
  CHECK(one.evicted == std::vector<EvictedBlock>{{one.ids[4], false}});
  for (const PinTicket ticket : {strict, fenced, ordered}) CHECK(one.blocks.unpin(ticket));
  CHECK(one.blocks.free_blocks() == 3);  // 0, 1, 3; the others are in use
}

TEST(evicted_pinned_block_is_freed_after_unpin) {
  Full one;
  const PinTicket ticket = one.pin(2);
  CHECK(static_cast<bool>(one.blocks.cache(one.first(2))));
  one.blocks.evict_waiting(one.evicted);
  CHECK(one.evicted.size() == 2 && one.blocks.waiting_blocks() == 2);
  CHECK(!one.blocks.touch(one.first(1)));
  CHECK(one.blocks.unpin(ticket) && one.blocks.free_blocks() == 2);
}

TEST(clear_frees_pinned_blocks_after_unpin) {
  Full one;
  const PinTicket ticket = one.pin(3);
  CHECK(static_cast<bool>(one.blocks.cache(one.first(1))));
  one.blocks.clear(one.evicted);
  CHECK(one.evicted.size() == 1 && one.blocks.used_blocks() == 3);
  CHECK(one.blocks.waiting_blocks() == 3 && static_cast<bool>(one.blocks.check_integrity()));
  CHECK(one.blocks.unpin(ticket) && one.blocks.used_blocks() == 0);
}

TEST(pinned_page_stays_mapped_under_limit_and_sleep) {
  auto pool = make_pool();
  REQUIRE(pool != nullptr);
  const std::vector<BlockId> ids = take(*pool, 3 * kBlocksPerPage - 1);
  const std::vector<BlockId> last(ids.end() - 1, ids.end());
  const PinTicket ticket = *pool->allocator.pin(last, PinKind::kStrict);
  CHECK(static_cast<bool>(pool->allocator.cache(ids)));
  pool->limits.set_asleep(true);
  CHECK(pool->limits.enforce()->mapped_bytes == 2 * kPage);  // the null block's, and the read one
  CHECK(pool->state.stats().blocks_pinned == 1 && pool->state.stats().blocks_used == 0);
  CHECK(pool->background.trim() && *pool->background.compact() == 0);
  CHECK(pool->state.available() == 0 && static_cast<bool>(pool->check_integrity()));
  CHECK(pool->allocator.unpin(ticket));
  CHECK(pool->state.limit_state().mapped_bytes == 0);
  CHECK(static_cast<bool>(pool->check_integrity()));
}

TEST(closed_pool_unmaps_pinned_page_after_unpin) {
  for (const bool discard : {false, true}) {
    auto pool = make_pool();
    REQUIRE(pool != nullptr);
    const std::vector<BlockId> ids = take(*pool, 4);
    const PinTicket ticket = *pool->allocator.pin(ids, PinKind::kOrdered);
    CHECK(static_cast<bool>(pool->allocator.free(ids)));
    CHECK(*pool->close(discard) == (discard ? 0U : 1U));
    CHECK(pool->allocator.unpin(ticket) == !discard);
    CHECK(pool->state.limit_state().mapped_bytes == 0);
    CHECK(static_cast<bool>(pool->check_integrity()));
  }
}

TEST(reserved_block_cannot_be_pinned) {
  auto pool = make_pool();
  REQUIRE(pool != nullptr);
  const std::vector<BlockId> ids = take(*pool, 1);
  CHECK(static_cast<bool>(pool->allocator.free(ids)));
  CHECK(*pool->allocator.try_to_reserve(kBlocksPerPage - 1));
  CHECK(pool->allocator.pin(ids, PinKind::kStrict).error().code == Errc::kDoubleFree);
}

TEST(alloc_reuses_pinned_blocks_before_mapping_pages) {
  auto pool = make_pool();
  REQUIRE(pool != nullptr);
  const std::vector<BlockId> ids = take(*pool, kBlocksPerPage - 1);
  const PinTicket ticket = *pool->allocator.pin(ids, PinKind::kOrdered);
  CHECK(static_cast<bool>(pool->allocator.free(ids)));
  CHECK(pool->state.reusable() == kBlocksPerPage - 1 && pool->state.available_mapped() == 0);
  const std::vector<BlockId> again = take(*pool, 2, true);
  CHECK(again.size() == 2 && pool->state.limit_state().mapped_bytes == kPage &&
        pool->state.reusable() == kBlocksPerPage - 3);
  const std::vector<BlockId> fresh = take(*pool, 2);
  CHECK(fresh.size() == 2 && pool->state.limit_state().mapped_bytes == 2 * kPage);
  for (const BlockId id : fresh) CHECK(std::find(ids.begin(), ids.end(), id) == ids.end());
  CHECK(pool->allocator.unpin(ticket));
  CHECK(pool->state.stats().blocks_used == 4 && static_cast<bool>(pool->check_integrity()));
}

}  // namespace kvelastic
