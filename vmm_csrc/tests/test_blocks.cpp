// Blocks against sets of ids, over random sequences; every list is also checked by what it gives.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "check.h"
#include "pool/blocks.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

Geometry geometry(std::uint64_t pages, std::uint64_t blocks_per_page, std::uint64_t block_bytes) {
  Geometry g;
  g.pages = pages;
  g.extent_bytes = 2 * kMiB;
  g.block_bytes = block_bytes;
  g.blocks_per_page = blocks_per_page;
  return g;
}

std::vector<BlockId> ids_of(const std::vector<EvictedBlock>& evicted) {
  std::vector<BlockId> ids;
  for (const EvictedBlock& block : evicted) ids.push_back(block.id);
  return ids;
}

/// What a reader of blocks.h expects, in sets and lists.
struct Model {
  std::set<BlockId> free_ids, used;
  std::vector<BlockId> cached;  // the first goes first

  void evicted(const std::vector<BlockId>& ids) {
    for (const BlockId id : ids) {
      const auto at = std::find(cached.begin(), cached.end(), id);
      if (!CHECK(at != cached.end())) continue;
      cached.erase(at);
      free_ids.insert(id);
    }
  }
};

struct Play {
  Play(const Geometry& g, std::uint32_t seed) : shape(g), random(seed) {
    auto made = Blocks::create(shape);
    CHECK(static_cast<bool>(made));
    blocks = *std::move(made);
  }

  std::vector<BlockId> some(std::vector<BlockId> from) {
    std::shuffle(from.begin(), from.end(), random);
    from.resize(random() % (from.size() + 1));
    return from;
  }
  std::vector<BlockId> used() const { return {model.used.begin(), model.used.end()}; }
  PageIndex page_of(BlockId id) const {
    return static_cast<PageIndex>(static_cast<std::uint64_t>(id) * shape.block_bytes /
                                  shape.extent_bytes);
  }

  void add_page() {
    const auto page = blocks->take_unmapped();
    if (!page) return;
    if (random() % 4 == 0) {
      blocks->put_back(*page);
      return;
    }
    blocks->add_page(*page);
    for (std::uint64_t i = *page == 0 ? 1 : 0; i < shape.blocks_per_page; ++i) {
      CHECK(model.free_ids.insert(shape.first_id(*page) + static_cast<BlockId>(i)).second);
    }
  }
  void remove_page() {
    const auto page = blocks->take_parked();
    if (!page) return;
    CHECK(*page != 0);
    for (std::uint64_t i = 0; i < shape.blocks_per_page; ++i) {
      CHECK(model.free_ids.erase(shape.first_id(*page) + static_cast<BlockId>(i)) == 1);
    }
    if (random() % 4 != 0) {
      blocks->put_back(*page);
      return;
    }
    blocks->add_page(*page);  // the unmap failed
    for (std::uint64_t i = 0; i < shape.blocks_per_page; ++i) {
      model.free_ids.insert(shape.first_id(*page) + static_cast<BlockId>(i));
    }
  }
  void alloc() {
    const std::size_t count = random() % (std::min<std::size_t>(model.free_ids.size(), 200) + 1);
    std::vector<BlockId> ids;
    blocks->alloc(count, random() % 2 == 0 ? Blocks::Fit::kBest : Blocks::Fit::kFullest, ids);
    CHECK(ids.size() == count);
    for (const BlockId id : ids) {
      CHECK(model.free_ids.erase(id) == 1);
      CHECK(model.used.insert(id).second);
    }
  }
  void free() {
    std::vector<BlockId> ids = some(used());
    const std::vector<BlockId> cached = some(model.cached);
    ids.insert(ids.end(), cached.begin(), cached.end());
    std::shuffle(ids.begin(), ids.end(), random);
    CHECK(static_cast<bool>(blocks->free(ids)));
    for (const BlockId id : ids) {
      if (model.used.erase(id) == 0) {
        model.cached.erase(std::find(model.cached.begin(), model.cached.end(), id));
      }
      model.free_ids.insert(id);
    }
  }
  void cache() {
    const std::vector<BlockId> ids = some(used());
    CHECK(static_cast<bool>(blocks->cache(ids)));
    for (const BlockId id : ids) model.used.erase(id);
    model.cached.insert(model.cached.end(), ids.begin(), ids.end());
  }
  void touch() {
    const std::vector<BlockId> ids = some(model.cached);
    CHECK(static_cast<bool>(blocks->touch(ids)));
    for (const BlockId id : ids) {
      model.cached.erase(std::find(model.cached.begin(), model.cached.end(), id));
      model.used.insert(id);
    }
  }
  void mistake() {
    std::vector<BlockId> ids = some(used());
    const std::vector<BlockId> wrong = {
        0, -1, static_cast<BlockId>(shape.pages * shape.extent_bytes / shape.block_bytes) + 1,
        std::numeric_limits<BlockId>::max(), std::numeric_limits<BlockId>::min()};
    ids.push_back(!ids.empty() && random() % 2 == 0 ? ids.front() : wrong[random() % wrong.size()]);
    CHECK(!blocks->free(ids));
    CHECK(!blocks->cache(ids));
    CHECK(!blocks->touch(ids));
  }
  void evict() {
    std::vector<EvictedBlock> gone;
    if (random() % 2 == 0) {
      const bool any = blocks->evict_oldest_block(gone);
      CHECK(any == !model.cached.empty());
      if (any) CHECK(ids_of(gone) == std::vector<BlockId>{model.cached.front()});
    } else {
      // The cheapest among the pages that hold cached blocks and no used one.
      std::map<PageIndex, std::uint32_t> cost;
      for (const BlockId id : model.cached) ++cost[page_of(id)];
      for (const BlockId id : model.used) cost.erase(page_of(id));
      cost.erase(0);
      std::optional<std::uint32_t> cheapest;
      for (const auto& [page, count] : cost) cheapest = std::min(cheapest.value_or(count), count);
      CHECK(blocks->cheapest_page_cost() == cheapest);
      CHECK(blocks->evict_cheapest_page(gone) == cheapest.has_value());
      CHECK(gone.size() == cheapest.value_or(0));
      std::set<PageIndex> pages;
      for (const EvictedBlock& block : gone) pages.insert(page_of(block.id));
      CHECK(pages.size() <= 1);
    }
    model.evicted(ids_of(gone));
  }
  void clear() {
    std::vector<EvictedBlock> gone;
    blocks->clear(gone);
    CHECK(ids_of(gone) == model.cached);
    model.evicted(ids_of(gone));
    model.free_ids.insert(model.used.begin(), model.used.end());
    model.used.clear();
  }

  void step() {
    const auto what = random() % 40;
    if (what < 4) add_page();
    if (what >= 4 && what < 6) remove_page();
    if (what >= 6 && what < 16) alloc();
    if (what >= 16 && what < 22) free();
    if (what >= 22 && what < 28) cache();
    if (what >= 28 && what < 32) touch();
    if (what >= 32 && what < 34) mistake();
    if (what >= 34 && what < 39) evict();
    if (what == 39 && random() % 8 == 0) clear();
    CHECK(blocks->free_blocks() == model.free_ids.size());
    CHECK(blocks->used_blocks() == model.used.size());
    CHECK(blocks->cached_blocks() == model.cached.size());
    const Status sound = blocks->check_integrity();
    CHECK(static_cast<bool>(sound));
  }

  const Geometry shape;
  std::mt19937 random;
  std::unique_ptr<Blocks> blocks;
  Model model;
};

}  // namespace

TEST(blocks_match_the_model) {
  std::uint32_t seed = 1;
  for (const Geometry& shape :
       {geometry(6, 8, 256 << 10), geometry(5, 1, 2 * kMiB), geometry(9, 70, 28 << 10),
        geometry(7, 63, 32 << 10), geometry(5, 64, 32 << 10), geometry(3, 4200, 480)}) {
    REQUIRE(static_cast<bool>(shape.check(2 * kMiB)));
    Play play(shape, seed++);
    for (int i = 0; i < 1500; ++i) play.step();
  }
}

TEST(blocks_stay_consistent_while_null_page_is_remapped) {
  auto made = Blocks::create(geometry(3, 8, 256 << 10));
  REQUIRE(static_cast<bool>(made));
  Blocks& blocks = **made;
  blocks.add_page(*blocks.take_unmapped());
  for (const bool unmapped : {false, true}) {
    REQUIRE(blocks.take_null_page() == PageIndex{0});
    CHECK(static_cast<bool>(blocks.check_integrity()));
    unmapped ? blocks.put_back(0) : blocks.add_page(0);
    CHECK(static_cast<bool>(blocks.check_integrity()));
    CHECK(blocks.null_page_is_bare() != unmapped);
  }
  blocks.add_page(*blocks.take_unmapped());
  std::vector<BlockId> ids;
  blocks.alloc(7, Blocks::Fit::kBest, ids);
  CHECK(std::set<BlockId>(ids.begin(), ids.end()) == std::set<BlockId>({1, 2, 3, 4, 5, 6, 7}));
  CHECK(static_cast<bool>(blocks.check_integrity()));
}

TEST(long_idle_blocks_are_evicted) {
  auto made = Blocks::create(geometry(3, 8, 256 << 10));
  REQUIRE(static_cast<bool>(made));
  Blocks& blocks = **made;
  for (int i = 0; i < 3; ++i) blocks.add_page(*blocks.take_unmapped());
  std::vector<BlockId> ids;
  blocks.alloc(6, Blocks::Fit::kBest, ids);
  const std::uint32_t start_ms = ~std::uint32_t{0} - 50;  // the clock wraps in between
  std::vector<EvictedBlock> evicted;
  const auto evict_at = [&](std::uint32_t after_ms) {
    evicted.clear();
    blocks.set_now(start_ms + after_ms);
    blocks.evict_idle(100, 200, evicted);
    CHECK(static_cast<bool>(blocks.check_integrity()));
    return evicted.size();
  };
  const std::vector<BlockKey> keys(1, BlockKey{1, 1});
  const std::vector<BlockKey> other_keys{{2, 2}, {3, 3}, {4, 4}};
  blocks.set_now(start_ms);
  CHECK(static_cast<bool>(blocks.name({{ids[0], ids[2], ids[3]}}, other_keys)));
  CHECK(static_cast<bool>(blocks.cache({{ids[0], ids[1], ids[2], ids[4]}})));
  blocks.set_now(start_ms + 60);
  CHECK(static_cast<bool>(blocks.cache({{ids[3]}})));
  CHECK(static_cast<bool>(blocks.name({{ids[1]}}, keys)));
  CHECK(blocks.mark_clean({{ids[1]}}, keys) == 1);
  CHECK(evict_at(99) == 0);
  CHECK(evict_at(100) == 2);  // the clean one, by the time when it was cached; then the keyless one
  CHECK(evicted[0] == (EvictedBlock{ids[1], true}));
  CHECK(evicted[1] == (EvictedBlock{ids[4], false}));
  blocks.set_now(start_ms + 150);
  CHECK(static_cast<bool>(blocks.touch({{ids[0]}})));
  CHECK(static_cast<bool>(blocks.cache({{ids[0]}})));
  CHECK(evict_at(200) == 1);  // used again, ids[0] is younger
  CHECK(evicted[0] == (EvictedBlock{ids[2], false}));
  CHECK(blocks.oldest_copyable_ms() == 140u);
  CHECK(evict_at(350) == 2);
  CHECK(!blocks.oldest_copyable_ms() && !blocks.oldest_not_copyable_ms());
}

TEST(blocks_of_a_range_with_the_most_blocks) {
  Geometry shape = geometry((std::uint64_t{1} << 31) - 1, 1, 2 * kMiB);
  REQUIRE(static_cast<bool>(shape.check(2 * kMiB)));
  auto made = Blocks::create(shape);
  REQUIRE(static_cast<bool>(made));
  for (int i = 0; i < 3; ++i) (*made)->add_page(*(*made)->take_unmapped());
  std::vector<BlockId> ids;
  (*made)->alloc(2, Blocks::Fit::kBest, ids);
  CHECK(std::set<BlockId>(ids.begin(), ids.end()) == std::set<BlockId>({1, 2}));
  CHECK((*made)->free({{3}}).error().code == Errc::kDoubleFree);
  CHECK((*made)->free({{BlockId{1} << 31}}).error().code == Errc::kUnknownBlock);
  CHECK(static_cast<bool>((*made)->free(ids)));
}

}  // namespace kvelastic
