// A pool that is shrunk, used and copied at the same time, for the thread sanitizer; and what it
// promises then: a block that is called demoted was copied while it held what it holds.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "pool/pool.h"
#include "pool_fixture.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kPages = 8;
constexpr std::uint64_t kBlocksPerPage = 4;

std::unique_ptr<Pool> pool_of(const std::shared_ptr<Range>& range) {
  PoolOptions options;
  options.max_blocks = kPages * kBlocksPerPage;
  options.limit_bytes = options.capacity_bytes = kPages * HostDriver::kGranularityBytes;
  options.preallocate = false;
  auto pool = Pool::create(range->geometry(), std::make_shared<LocalBacking>(range), options);
  CHECK(static_cast<bool>(pool));
  (*pool)->writeback.use_tiers(
      {std::chrono::milliseconds(20), std::chrono::hours(1), std::chrono::hours(1)});
  return *std::move(pool);
}

/// Serves demotions until told to stop.
class Demoter {
 public:
  explicit Demoter(Pool& pool)
      : pool_(pool), staging_(*Staging::create(4, pool.writeback.record_bytes())) {
    (void)pool_.writeback.next_demotion(std::chrono::nanoseconds(0));
    thread_ = std::thread([this] { serve(); });
  }
  ~Demoter() {
    ending_ = true;
    while (!ended_) {
      pool_.writeback.stop_demotions();
      std::this_thread::yield();
    }
    thread_.join();
  }

 private:
  void serve() {
    while (!ending_) {
      if (!pool_.writeback.next_demotion(std::chrono::seconds(10))) continue;
      const WritebackBatch leaving = pool_.writeback.begin(4);
      std::vector<BlockSlot> blocks;
      for (std::size_t i = 0; i < leaving.ids.size(); ++i) blocks.push_back({leaving.ids[i], i});
      CHECK(static_cast<bool>(pool_.writeback.copy_records(blocks, staging_, CopyTo::kHost)));
      const std::vector<std::uint8_t> copied(leaving.ids.size(), 1);
      CHECK(static_cast<bool>(pool_.writeback.end(leaving.ticket, copied)));
    }
    ended_ = true;
  }

  Pool& pool_;
  const std::shared_ptr<Staging> staging_;
  std::atomic<bool> ending_{false}, ended_{false};
  std::thread thread_;
};

TEST(pool_is_shrunk_used_and_copied_concurrently) {
  const std::shared_ptr<Range> range = host_range(one_buffer(kPages, kBlocksPerPage));
  const std::unique_ptr<Pool> pool = pool_of(range);
  {
    const Demoter demoter(*pool);
    std::thread engine([&] {
      std::mt19937 random(1);
      std::uint64_t name = 0;
      for (int step = 0; step < 3000; ++step) {
        auto ids = pool->allocator.alloc(1 + random() % 6);
        if (!CHECK(static_cast<bool>(ids))) return;
        if (*ids) {
          std::vector<BlockKey> keys;
          for (std::size_t i = 0; i < (*ids)->size(); ++i) keys.push_back({++name, 7});
          CHECK(static_cast<bool>(pool->allocator.cache(**ids, keys)));
        }
        if (step % 16 == 0) (void)pool->allocator.take_changes();
      }
    });
    std::thread limits([&] {
      std::mt19937 random(2);
      for (int step = 0; step < 200; ++step) {
        if (random() % 4 == 0) {
          pool->limits.set_asleep(true);
          CHECK(static_cast<bool>(pool->limits.settle()));
          pool->limits.set_asleep(false);
        }
        (void)pool->limits.set((1 + random() % kPages) * HostDriver::kGranularityBytes);
        CHECK(static_cast<bool>(pool->limits.enforce()));
        CHECK(static_cast<bool>(pool->background.give_up(1 + random() % 3, Depth::kCached, 1)));
      }
    });
    engine.join();
    limits.join();
    (void)pool->limits.set(kPages * HostDriver::kGranularityBytes);
    CHECK(static_cast<bool>(pool->limits.enforce()));
    auto ids = pool->allocator.alloc(kPages * kBlocksPerPage - 1);
    REQUIRE(static_cast<bool>(ids) && ids->has_value());
    const std::vector<BlockKey> keys((*ids)->size(), BlockKey{1, 1});
    CHECK(static_cast<bool>(pool->allocator.cache(**ids, keys)));
    const std::uint64_t before = pool->state.stats().blocks_demoted;
    pool->limits.set_asleep(true);
    CHECK(static_cast<bool>(pool->limits.settle()));
    CHECK(pool->state.stats().blocks_demoted == before + keys.size());
  }
  CHECK(static_cast<bool>(pool->check_integrity()));
  const PoolStats stats = pool->state.stats();
  CHECK(stats.blocks_under_writeback == 0);
  CHECK(stats.blocks_demoted + stats.blocks_dropped == stats.blocks_evicted);
}

TEST(new_request_ends_the_wait_for_writeback) {
  const std::shared_ptr<Range> range = host_range(one_buffer(kPages, kBlocksPerPage));
  const std::unique_ptr<Pool> pool = pool_of(range);
  auto ids = pool->allocator.alloc(kPages * kBlocksPerPage - 1);
  REQUIRE(static_cast<bool>(ids) && ids->has_value());
  std::vector<BlockKey> keys;
  for (const BlockId id : **ids) keys.push_back({static_cast<std::uint64_t>(id), 1});
  CHECK(static_cast<bool>(pool->allocator.cache(**ids, keys)));
  (void)pool->writeback.next_demotion(std::chrono::nanoseconds(0));
  (void)pool->limits.set(HostDriver::kGranularityBytes);
  std::atomic<bool> request{false};
  std::thread maintenance(
      [&] { CHECK(static_cast<bool>(pool->limits.enforce([&] { return request.load(); }))); });
  const auto want = pool->writeback.next_demotion(std::chrono::seconds(60));
  CHECK(want && want->reason == DemotionReason::kLimit);
  const WritebackBatch leaving = pool->writeback.begin(kBlocksPerPage);
  CHECK(static_cast<bool>(
      pool->writeback.end(leaving.ticket, std::vector<std::uint8_t>(leaving.ids.size(), 1))));
  // A page that is clean goes at once, the dirty ones stay: the wait has an hour to go.
  while (pool->state.limit_state().mapped_bytes == kPages * HostDriver::kGranularityBytes) {
    std::this_thread::yield();
  }
  CHECK(pool->state.stats().blocks_dropped == 0);
  request = true;
  maintenance.join();
  CHECK(pool->state.limit_state().over_bytes == 0 && pool->state.stats().blocks_dropped > 0);
}

TEST(consecutive_reclaims_share_one_wait_budget) {
  using std::chrono::milliseconds;
  Demotions demotions;
  demotions.use({milliseconds(20), milliseconds(2000), milliseconds(30000)});
  const Demotions::Clock::time_point start = Demotions::Clock::now();
  CHECK(demotions.reclaim_wait(start) == milliseconds(20));
  demotions.note_reclaim(milliseconds(15));
  CHECK(demotions.reclaim_wait(start) == milliseconds(5));
  demotions.note_reclaim(milliseconds(6));
  CHECK(demotions.reclaim_wait(start) == milliseconds(0));
  CHECK(demotions.reclaim_wait(start + milliseconds(100)) == milliseconds(2));
  CHECK(demotions.reclaim_wait(start + milliseconds(500)) == milliseconds(10));
  CHECK(demotions.reclaim_wait(start + std::chrono::hours(1)) == milliseconds(20));
}

}  // namespace
}  // namespace kvelastic
