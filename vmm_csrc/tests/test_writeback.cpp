// Keys, copies and blocks under writeback, against a model that keeps the rules in maps.
#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "pool/blocks.h"
#include "pool_fixture.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kBlocksPerPage = 8;

Geometry geometry(std::uint64_t pages) {
  return one_buffer(pages, kBlocksPerPage);
}

BlockKey key(std::uint64_t number) {
  return {number, ~number};
}

/// Mapped pages, and one block cached after the other.
struct Pages {
  explicit Pages(std::uint64_t count) {
    blocks = *Blocks::create(geometry(count));
    for (std::uint64_t i = 0; i < count; ++i) blocks->add_page(*blocks->take_unmapped());
    blocks->alloc(count * kBlocksPerPage - 1, Blocks::Fit::kBest, ids);
    std::sort(ids.begin(), ids.end());
  }
  /// The j-th block of a page; page 0 has none before the null block.
  BlockId at(std::uint64_t page, std::uint64_t slot) const {
    return static_cast<BlockId>(page * kBlocksPerPage + slot);
  }
  void cache(const std::vector<BlockId>& some, bool clean = false) {
    CHECK(static_cast<bool>(blocks->cache(some)));
    std::vector<BlockKey> keys;
    for (const BlockId id : some) keys.push_back(key(static_cast<std::uint64_t>(id) + 1));
    CHECK(static_cast<bool>(blocks->name(some, keys)));
    if (clean) CHECK(blocks->mark_clean(some, keys) == some.size());
    sound();
  }
  void sound() { CHECK(static_cast<bool>(blocks->check_integrity())); }
  std::vector<EvictedBlock> evict_page() {
    std::vector<EvictedBlock> gone;
    CHECK(blocks->evict_cheapest_page(gone));
    sound();
    return gone;
  }

  std::unique_ptr<Blocks> blocks;
  std::vector<BlockId> ids;
};

std::vector<std::uint8_t> all(const WritebackBatch& batch, std::uint8_t flag = 1) {
  return std::vector<std::uint8_t>(batch.ids.size(), flag);
}

TEST(clean_blocks_and_pages_are_evicted_first) {
  Pages one(4);
  one.cache({one.at(1, 0)});
  one.cache({one.at(2, 0), one.at(2, 1)}, true);
  one.cache({one.at(3, 0)}, true);
  std::vector<BlockId> rest;
  for (const BlockId id : one.ids) {
    if (id != one.at(1, 0) && id != one.at(2, 0) && id != one.at(2, 1) && id != one.at(3, 0)) {
      rest.push_back(id);
    }
  }
  CHECK(static_cast<bool>(one.blocks->free(rest)));
  CHECK(one.blocks->clean_pages() == 2 && one.blocks->evictable_pages() == 3);
  CHECK((one.evict_page() == std::vector<EvictedBlock>{{one.at(3, 0), true}}));
  std::vector<EvictedBlock> gone;
  CHECK(one.blocks->evict_oldest_block(gone) && gone.back() == (EvictedBlock{one.at(2, 0), true}));
  CHECK(one.blocks->evict_oldest_block(gone) && gone.back() == (EvictedBlock{one.at(2, 1), true}));
  CHECK(one.blocks->evict_oldest_block(gone) && gone.back() == (EvictedBlock{one.at(1, 0), false}));
  CHECK(!one.blocks->evict_oldest_block(gone));
  one.sound();
}

TEST(page_under_writeback_stays_and_blocks_remain_usable) {
  Pages one(2);
  std::vector<BlockId> page(one.ids.begin() + 7, one.ids.end());
  CHECK(static_cast<bool>(
      one.blocks->free(std::vector<BlockId>(one.ids.begin(), one.ids.begin() + 7))));
  one.cache(page);
  const WritebackBatch batch = one.blocks->begin_writeback(3, Blocks::WriteFirst::kOldest);
  CHECK((batch.ids == std::vector<BlockId>(page.begin(), page.begin() + 3)));
  CHECK(batch.keys[1] == key(static_cast<std::uint64_t>(page[1]) + 1));
  one.sound();
  std::vector<EvictedBlock> gone;
  CHECK(!one.blocks->evict_cheapest_page(gone));
  while (one.blocks->evict_oldest_block(gone)) {
  }
  CHECK(gone.size() == 8 && one.blocks->parked_pages() == 0);
  one.sound();
  std::vector<BlockId> again;
  one.blocks->alloc(one.blocks->free_blocks(), Blocks::Fit::kBest, again);
  CHECK(again.size() == 15);
  CHECK(one.blocks->end_writeback(batch.ticket, all(batch)) == 0);
  one.sound();
  CHECK(static_cast<bool>(one.blocks->free(again)));
  CHECK(one.blocks->parked_pages() == 1);
  one.sound();
}

TEST(writeback_marks_only_unchanged_blocks_clean) {
  Pages one(2);
  one.cache(one.ids);
  const WritebackBatch batch = one.blocks->begin_writeback(100, Blocks::WriteFirst::kOldest);
  CHECK(batch.ids.size() == 15 && one.blocks->writeback_blocks() == 15);
  CHECK(one.blocks->begin_writeback(100, Blocks::WriteFirst::kOldest).ids.empty());
  const std::vector<BlockId> touched{one.ids[0]}, renamed{one.ids[1]}, freed{one.ids[2]};
  const std::vector<BlockId> reused{one.ids[3]};
  CHECK(static_cast<bool>(one.blocks->touch(touched)));
  CHECK(static_cast<bool>(one.blocks->name(renamed, std::vector<BlockKey>{key(99)})));
  CHECK(static_cast<bool>(one.blocks->free(freed)) && static_cast<bool>(one.blocks->free(reused)));
  // One comes back with the very key that it had: its bytes were written anew meanwhile.
  std::vector<BlockId> got;
  one.blocks->alloc(2, Blocks::Fit::kBest, got);
  CHECK(static_cast<bool>(one.blocks->free(freed)));
  one.cache(reused);
  const std::vector<std::uint8_t> still = one.blocks->still_unchanged(batch.ticket);
  CHECK(still.size() == 15 && still[0] == 1 && still[1] == 0 && still[2] == 0 && still[3] == 0);
  std::vector<std::uint8_t> copied = all(batch);
  copied[14] = 0;
  CHECK(one.blocks->end_writeback(batch.ticket, copied) == 15 - 3 - 1);
  CHECK(one.blocks->end_writeback(batch.ticket, copied) == 0);
  one.sound();
  CHECK(one.blocks->clean_blocks() == 10 && one.blocks->writeback_blocks() == 0);
  CHECK(static_cast<bool>(one.blocks->cache(touched)));
  CHECK(one.blocks->clean_blocks() == 11);
  const WritebackBatch rest = one.blocks->begin_writeback(100, Blocks::WriteFirst::kOldest);
  CHECK((std::set<BlockId>(rest.ids.begin(), rest.ids.end()) ==
         std::set<BlockId>{renamed[0], reused[0], one.ids[14]}));
  CHECK(one.blocks->end_writeback(rest.ticket, all(rest, 0)) == 0);
  one.sound();
}

TEST(cheapest_pages_are_written_back_first) {
  Pages one(4);
  one.cache({one.at(3, 0), one.at(3, 1), one.at(3, 2)});
  one.cache({one.at(1, 0)});
  one.cache({one.at(2, 0), one.at(2, 1)});
  std::vector<BlockId> used, rest;
  for (const BlockId id : one.ids) {
    if (id / 8 == 3 ? id % 8 > 2 : id / 8 == 2 ? id % 8 > 1 : id != one.at(1, 0)) {
      (id == one.at(1, 7) ? used : rest).push_back(id);
    }
  }
  CHECK(static_cast<bool>(one.blocks->free(rest)));
  const WritebackBatch first = one.blocks->begin_writeback(3, Blocks::WriteFirst::kOfOnePage);
  CHECK((first.ids == std::vector<BlockId>{one.at(2, 0), one.at(2, 1), one.at(3, 0)}));
  const WritebackBatch then = one.blocks->begin_writeback(9, Blocks::WriteFirst::kOfOnePage);
  CHECK((then.ids == std::vector<BlockId>{one.at(3, 1), one.at(3, 2), one.at(1, 0)}));
  one.sound();
  CHECK(one.blocks->end_writeback(first.ticket, all(first)) == 3);
  CHECK(one.blocks->clean_pages() == 1);
  CHECK(one.blocks->end_writeback(then.ticket, all(then)) == 3);
  CHECK(one.blocks->clean_pages() == 2 && one.blocks->dirty_blocks() == 0);
  CHECK(one.blocks->forget_copies() == 6 && one.blocks->clean_pages() == 0);
  one.sound();
}

TEST(keyless_and_pinned_blocks_are_not_written_back) {
  Pages one(2);
  CHECK(static_cast<bool>(one.blocks->cache(std::vector<BlockId>{one.ids[0]})));
  one.cache({one.ids[1], one.ids[2]});
  const auto pinned = one.blocks->pin(std::vector<BlockId>{one.ids[1]}, PinKind::kStrict);
  const WritebackBatch batch = one.blocks->begin_writeback(9, Blocks::WriteFirst::kOldest);
  CHECK((batch.ids == std::vector<BlockId>{one.ids[2]}));
  CHECK(one.blocks->end_writeback(batch.ticket, all(batch)) == 1);
  CHECK(one.blocks->unpin(*pinned));
  CHECK(one.blocks->dirty_blocks() == 2 && one.blocks->clean_blocks() == 1);
  CHECK(!one.blocks->name(std::vector<BlockId>{0}, std::vector<BlockKey>{key(1)}));
  one.sound();
}

/// Random sequences: what is evicted as clean must have been copied while it held what it holds.
TEST(clean_blocks_were_always_copied) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    Pages one(6);
    Blocks& blocks = *one.blocks;
    CHECK(static_cast<bool>(blocks.free(one.ids)));
    std::map<BlockId, std::uint64_t> holds;              // version of what is in a block
    std::map<BlockId, bool> cached;                      // used: false
    std::set<std::pair<BlockId, std::uint64_t>> copies;  // versions that a tier has
    struct Batch {
      WritebackBatch batch;
      std::vector<std::uint64_t> read;
    };
    std::vector<Batch> batches;
    std::uint64_t version = 0;
    const auto some = [&](bool want) {
      std::vector<BlockId> out;
      for (const auto& [id, is] : cached) {
        if (is == want && random() % 3 == 0) out.push_back(id);
      }
      std::shuffle(out.begin(), out.end(), random);
      return out;
    };
    const auto gone = [&](const std::vector<EvictedBlock>& evicted) {
      for (const EvictedBlock& block : evicted) {
        if (block.has_copy) CHECK(copies.contains({block.id, holds[block.id]}));
        cached.erase(block.id);
      }
    };
    for (int step = 0; step < 150; ++step) {
      switch (random() % 10) {
        case 0:
        case 1: {
          std::vector<BlockId> ids;
          blocks.alloc(random() % (blocks.free_blocks() + 1), Blocks::Fit::kBest, ids);
          for (const BlockId id : ids) cached[id] = false, holds[id] = ++version;
          break;
        }
        case 2: {
          const std::vector<BlockId> ids = some(false);
          std::vector<BlockKey> keys;
          for (const BlockId id : ids) keys.push_back(key(holds[id]));
          CHECK(static_cast<bool>(blocks.cache(ids)) && static_cast<bool>(blocks.name(ids, keys)));
          for (const BlockId id : ids) cached[id] = true;
          break;
        }
        case 3: {
          const std::vector<BlockId> ids = some(true);
          CHECK(static_cast<bool>(blocks.touch(ids)));
          for (const BlockId id : ids) cached[id] = false;
          break;
        }
        case 4: {
          const std::vector<BlockId> ids = some(random() % 2 == 0);
          CHECK(static_cast<bool>(blocks.free(ids)));
          for (const BlockId id : ids) cached.erase(id);
          break;
        }
        case 5: {
          std::vector<EvictedBlock> evicted;
          (void)(random() % 2 == 0 ? blocks.evict_oldest_block(evicted)
                                   : blocks.evict_cheapest_page(evicted));
          gone(evicted);
          break;
        }
        case 6:
        case 7: {
          Batch batch{blocks.begin_writeback(random() % 9, random() % 2 == 0
                                                               ? Blocks::WriteFirst::kOldest
                                                               : Blocks::WriteFirst::kOfOnePage),
                      {}};
          for (const BlockId id : batch.batch.ids) batch.read.push_back(holds[id]);
          if (!batch.batch.ids.empty()) batches.push_back(batch);
          break;
        }
        case 8: {
          if (batches.empty()) break;
          std::swap(batches[random() % batches.size()], batches.back());
          const Batch batch = batches.back();
          batches.pop_back();
          std::vector<std::uint8_t> copied;
          for (std::size_t i = 0; i < batch.read.size(); ++i) {
            copied.push_back(random() % 4 != 0);
            if (copied.back() != 0) copies.insert({batch.batch.ids[i], batch.read[i]});
          }
          (void)blocks.end_writeback(batch.batch.ticket, copied);
          break;
        }
        default: {
          if (const auto page = blocks.take_parked()) {
            for (const Batch& batch : batches) {
              for (const BlockId id : batch.batch.ids) CHECK(id / 8 != *page);
            }
            random() % 2 == 0 ? blocks.add_page(*page) : blocks.put_back(*page);
          } else if (const auto fresh = blocks.take_unmapped()) {
            blocks.add_page(*fresh);
          }
          if (random() % 20 == 0) {
            (void)blocks.forget_copies();
            copies.clear();
          }
        }
      }
      const Status sound = blocks.check_integrity();
      if (!CHECK(static_cast<bool>(sound))) return;
    }
  }
}

}  // namespace
}  // namespace kvelastic
