// The index of a tier against a model that is too simple to be wrong, and from several threads.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <new>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "tiers/tier_index.h"

namespace {

/// How many allocations of this thread still succeed; negative: all.
thread_local int allocations_left = -1;

void* allocate(std::size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void* at = std::malloc(bytes == 0 ? 1 : bytes)) return at;
  throw std::bad_alloc();
}

}  // namespace

// Not inlined: the compiler would see malloc on one side only, and call it a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  return allocate(bytes);
}
// What std::stable_sort asks for; delete below is for both.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* at) noexcept {
  std::free(at);
}
[[gnu::noinline]] void operator delete(void* at, std::size_t) noexcept {
  std::free(at);
}

namespace kvelastic {
namespace {

constexpr EvictionPolicy kPolicies[] = {EvictionPolicy::kLru, EvictionPolicy::kLfu,
                                        EvictionPolicy::kSlru, EvictionPolicy::kFifo};
constexpr TierIndex::Chain kNoChain{};

BlockKey key(std::uint64_t number) {
  return {number, 0};
}

std::vector<BlockKey> keys(std::initializer_list<std::uint64_t> numbers) {
  std::vector<BlockKey> out;
  for (const std::uint64_t number : numbers) out.push_back(key(number));
  return out;
}

/// The numbers of the keys that were displaced for these.
std::vector<std::uint64_t> put(TierIndex& index, const std::vector<BlockKey>& wanted,
                               TierIndex::Chain chain = kNoChain) {
  const auto claimed = index.claim(wanted, chain);
  std::vector<std::uint64_t> gone;
  if (!CHECK(static_cast<bool>(claimed))) return gone;
  std::vector<BlockKey> taken;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if ((*claimed).slots[i] >= 0) taken.push_back(wanted[i]);
  }
  CHECK(static_cast<bool>(index.commit(taken)));
  for (const KeyInSlot& record : (*claimed).displaced) gone.push_back(record.key.low);
  CHECK(static_cast<bool>(index.check_integrity()));
  return gone;
}

std::shared_ptr<TierIndex> make(std::uint64_t slots, EvictionPolicy policy) {
  auto made = TierIndex::create(slots, policy);
  return made ? *std::move(made) : nullptr;
}

}  // namespace

TEST(tier_index_assigns_each_slot_once) {
  std::mt19937_64 random(16);
  for (const EvictionPolicy policy : kPolicies) {
    const auto index = make(64, policy);
    std::map<std::uint64_t, std::int64_t> where;  // ready or pending
    std::map<TierIndex::Ticket, std::vector<KeyInSlot>> holds;
    std::multiset<std::int64_t> held;
    std::uint64_t slots = 64;
    for (int round = 0; round < 3000; ++round) {
      const std::uint64_t first = random() % 200 + 1;
      std::vector<BlockKey> some;
      for (std::uint64_t i = 0; i < random() % 8; ++i) some.push_back(key(first + i));
      switch (random() % 8) {
        case 0:
        case 1: {
          const bool chain = random() % 4 != 0;
          const auto claimed = index->claim(some, {chain, key(first - 1)});
          REQUIRE(static_cast<bool>(claimed));
          for (const KeyInSlot& record : (*claimed).displaced) {
            CHECK(where.at(record.key.low) == record.slot);
            CHECK(!held.contains(record.slot));
            where.erase(record.key.low);
          }
          std::vector<BlockKey> taken;
          for (std::size_t i = 0; i < some.size(); ++i) {
            const std::int64_t slot = (*claimed).slots[i];
            if (slot == TierIndex::kThereAlready) CHECK(where.contains(some[i].low));
            if (slot < 0) continue;
            CHECK(slot < static_cast<std::int64_t>(slots));
            for (const auto& [number, at] : where) CHECK(at != slot);
            CHECK(!held.contains(slot));
            where[some[i].low] = slot;
            taken.push_back(some[i]);
          }
          if (random() % 8 == 0) {
            CHECK(static_cast<bool>(index->abandon(taken)));
            for (const BlockKey& each : taken) where.erase(each.low);
          } else {
            auto gone = index->commit(taken);
            CHECK(gone && gone->empty());
          }
          break;
        }
        case 2: {
          const TierIndex::Held hold = index->hold(some);
          std::vector<KeyInSlot>& mine = holds[hold.ticket];
          for (std::size_t i = 0; i < hold.slots.size(); ++i) {
            CHECK(where.at(some[i].low) == hold.slots[i]);
            held.insert(hold.slots[i]);
            mine.push_back({some[i], static_cast<std::uint32_t>(hold.slots[i])});
          }
          break;
        }
        case 3:
          if (!holds.empty()) {
            const auto ticket = holds.begin()->first;
            for (const KeyInSlot& record : holds.at(ticket)) held.erase(held.find(record.slot));
            holds.erase(ticket);
            const auto freed = index->release(ticket);
            REQUIRE(static_cast<bool>(freed));
            for (const KeyInSlot& record : *freed) CHECK(!held.contains(record.slot));
            CHECK(!index->release(ticket));
          }
          break;
        case 4:
          index->match(some);
          for (const KeyInSlot& record : index->erase(std::span(some).first(some.size() / 4))) {
            CHECK(!held.contains(record.slot));
          }
          for (const BlockKey& each : std::span(some).first(some.size() / 4)) where.erase(each.low);
          break;
        case 5: {
          const auto closed = index->close_by_policy(random() % 8);
          for (const KeyInSlot& record : closed.displaced) where.erase(record.key.low);
          for (const std::int64_t slot : closed.slots) {
            CHECK(!held.contains(slot));
            for (const auto& [number, at] : where) CHECK(at != slot);
          }
          if (random() % 4 != 0) CHECK(static_cast<bool>(index->open(closed.slots)));
          break;
        }
        case 6:
          for (const KeyInSlot& record : index->displace(random() % 4)) {
            CHECK(where.at(record.key.low) == record.slot && !held.contains(record.slot));
            where.erase(record.key.low);
          }
          break;
        default:
          if (random() % 8 != 0) break;
          slots = random() % 96;
          REQUIRE(static_cast<bool>(index->resize(slots)));
          std::erase_if(where, [&](const auto& each) {
            return each.second >= static_cast<std::int64_t>(slots);
          });
      }
      if (!CHECK(static_cast<bool>(index->check_integrity()))) return;
      for (const auto& [number, slot] : where) CHECK(index->slot_of(key(number)) == slot);
      CHECK(index->stats().ready == where.size());
    }
  }
}

TEST(tier_index_counts_leading_ready_and_known_keys) {
  const auto made = TierIndex::create(8, EvictionPolicy::kLru);
  REQUIRE(made);
  TierIndex& index = **made;
  REQUIRE(index.claim(keys({1, 2, 3, 5}), kNoChain));
  REQUIRE(index.commit(keys({1, 3})));
  const auto leads = [&](std::initializer_list<std::uint64_t> of, std::size_t ready,
                         std::size_t known) {
    const TierIndex::Leading counts = index.leading(keys(of));
    return counts.ready == ready && counts.known == known;
  };
  CHECK(leads({1, 2, 3, 4, 5}, 1, 3));
  CHECK(leads({2, 1}, 0, 2));
  CHECK(leads({1, 3}, 2, 2));
  CHECK(leads({4, 1}, 0, 0));
  CHECK(leads({}, 0, 0));
  (void)index.erase(keys({2}));  // pending, and forgotten: it will not come
  CHECK(leads({1, 2, 3}, 1, 1));
}

TEST(tier_index_eviction_order_of_each_policy) {
  const auto order = [](EvictionPolicy policy) {
    const auto index = make(5, policy);
    put(*index, keys({1, 2, 3, 4, 5}));
    for (const std::uint64_t used : {1, 1, 1, 3, 2, 2}) index->match(keys({used}));
    return put(*index, keys({11, 12, 13, 14, 15}));
  };
  using Order = std::vector<std::uint64_t>;
  CHECK(order(EvictionPolicy::kFifo) == Order{1, 2, 3, 4, 5});
  CHECK(order(EvictionPolicy::kLru) == Order{4, 5, 1, 3, 2});
  CHECK(order(EvictionPolicy::kLfu) == Order{4, 5, 3, 2, 1});
  CHECK(order(EvictionPolicy::kSlru) == Order{4, 5, 1, 3, 2});
}

TEST(tier_index_slru_bounds_its_protected_segment) {
  const auto index = make(5, EvictionPolicy::kSlru);
  put(*index, keys({1, 2, 3, 4, 5}));
  for (const std::uint64_t used : {1, 2, 3, 4, 5}) index->match(keys({used}));
  // Four may be protected: 1 was used least recently and goes back, to the young end.
  CHECK(put(*index, keys({6})) == std::vector<std::uint64_t>{1});
  CHECK(put(*index, keys({7})) == std::vector<std::uint64_t>{6});
  CHECK(index->match(keys({2, 3, 4, 5})) == 4);
}

TEST(tier_index_evicts_chains_from_the_end) {
  for (const EvictionPolicy policy : kPolicies) {
    const auto index = make(4, policy);
    put(*index, keys({1, 2, 3, 4}), {true, BlockKey{}});
    CHECK(put(*index, keys({5}), {true, BlockKey{}}) == std::vector<std::uint64_t>{4});
    index->match(keys({5}));
    CHECK(index->match(keys({1, 2, 3, 4})) == 3);
  }
}

TEST(tier_index_removes_ghosts_with_last_child) {
  const auto index = make(2, EvictionPolicy::kLru);
  // Each is continued by the next, of which only every second one comes.
  for (std::uint64_t i = 2; i < 100'000; i += 2) {
    const auto claimed = index->claim(keys({i}), {true, key(i - 1)});
    REQUIRE(static_cast<bool>(claimed));
    REQUIRE(static_cast<bool>(index->commit(keys({i}))));
  }
  CHECK(static_cast<bool>(index->check_integrity()));
}

TEST(tier_index_evicts_cyclic_parents) {
  const auto index = make(2, EvictionPolicy::kLru);
  put(*index, keys({1}), {true, key(2)});
  put(*index, keys({2}), {true, key(1)});
  put(*index, keys({1}), {true, key(1)});
  CHECK(put(*index, keys({3, 4})).size() == 2);
  CHECK(index->stats().ready == 2);
}

TEST(tier_index_refuses_invalid_calls_without_damage) {
  CHECK(!TierIndex::create(TierIndex::kMostSlots + 1, EvictionPolicy::kLru));
  const auto index = make(2, EvictionPolicy::kLru);
  CHECK(!index->claim(std::vector<BlockKey>{key(1), BlockKey{}}, kNoChain));
  CHECK(index->stats().pending == 0);
  CHECK(static_cast<bool>(index->claim(keys({1}), kNoChain)));
  CHECK(!index->commit(keys({1, 2})));
  CHECK(!index->abandon(keys({1, 2})));
  CHECK(index->stats().pending == 1);
  CHECK(!index->release(1));
  CHECK(!index->resize(TierIndex::kMostSlots + 1));
  CHECK(static_cast<bool>(index->check_integrity()));
}

TEST(tier_index_resize_keeps_most_recent_keys) {
  const auto index = make(0, EvictionPolicy::kSlru);
  CHECK(put(*index, keys({1})).empty());
  CHECK(index->stats().ready == 0);
  REQUIRE(static_cast<bool>(index->resize(1000)));
  put(*index, keys({1, 2, 3}), {true, BlockKey{}});
  REQUIRE(static_cast<bool>(index->resize(1 << 22)));
  CHECK(index->match(keys({1, 2, 3})) == 3);
  auto gone = index->resize(1);
  REQUIRE(static_cast<bool>(gone));
  CHECK(gone->size() == 2);
  CHECK(index->match(keys({1, 2, 3})) == 1);
}

TEST(tier_index_stays_consistent_after_bad_alloc) {
  for (int left = 0; left < 12; ++left) {
    const auto index = make(4, EvictionPolicy::kSlru);
    put(*index, keys({1, 2, 3, 4}), {true, BlockKey{}});
    const std::vector<BlockKey> here = keys({1, 2, 3, 4});
    const std::vector<BlockKey> more = keys({5, 6});
    const TierIndex::Held hold = index->hold(std::span(here).first(1));
    const auto attempt = [&](auto call) {
      const TierIndex::Stats before = index->stats();
      bool failed = false;
      allocations_left = left;
      try {
        call();
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      allocations_left = -1;
      CHECK(static_cast<bool>(index->check_integrity()));
      const TierIndex::Stats after = index->stats();
      if (failed) {
        CHECK(before.ready == after.ready && before.pending == after.pending &&
              before.held == after.held && before.displaced == after.displaced);
      }
    };
    attempt([&] { (void)index->hold(here); });
    attempt([&] { (void)index->claim(more, {true, key(2)}); });
    attempt([&] { (void)index->erase(here); });
    attempt([&] { (void)index->resize(1); });
    CHECK(static_cast<bool>(index->release(hold.ticket)));
    CHECK(static_cast<bool>(index->check_integrity()));
  }
}

TEST(tier_index_from_several_threads) {
  const auto index = make(256, EvictionPolicy::kSlru);
  std::atomic<std::uint64_t> wrong = 0;
  const auto work = [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int round = 0; round < 400; ++round) {
      std::vector<BlockKey> some;
      const std::uint64_t first = random() % 1000 + 1;
      for (std::uint64_t i = 0; i < 16; ++i) some.push_back(key(first + i));
      auto claimed = index->claim(some, {true, key(first - 1)});
      if (!claimed) {
        ++wrong;
        continue;
      }
      std::vector<BlockKey> taken;
      for (std::size_t i = 0; i < some.size(); ++i) {
        if ((*claimed).slots[i] >= 0) taken.push_back(some[i]);
      }
      if (!index->commit(taken)) ++wrong;
      const TierIndex::Held hold = index->hold(some);
      for (std::size_t i = 0; i < hold.slots.size(); ++i) {
        if (index->slot_of(some[i]) != hold.slots[i]) ++wrong;
      }
      if (!index->release(hold.ticket)) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 3; ++i) threads.emplace_back(work, i);
  for (std::thread& each : threads) each.join();
  CHECK(wrong == 0);
  CHECK(index->stats().held == 0);
  CHECK(static_cast<bool>(index->check_integrity()));
}

}  // namespace kvelastic
