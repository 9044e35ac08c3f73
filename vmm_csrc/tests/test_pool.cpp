// The pool under threads, over local memory and over a ring: what the sanitizers look at.
#include <algorithm>
#include <atomic>
#include <random>
#include <semaphore>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "driver/fault_driver.h"
#include "driver/host_driver.h"
#include "pool/maintenance_thread.h"
#include "pool/pool.h"
#include "pool_fixture.h"
#include "segment/ring_backing.h"
#include "segment/ring_worker.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kPage = HostDriver::kGranularityBytes;
constexpr std::uint64_t kPages = 6;
constexpr std::uint64_t kBlocksPerPage = 16;

Geometry geometry() {
  return one_buffer(kPages, kBlocksPerPage);
}

PoolOptions options() {
  PoolOptions o;
  o.max_blocks = kPages * kBlocksPerPage;
  o.limit_bytes = o.capacity_bytes = kPages * kPage;
  o.min_reserved_pages = 1;
  o.max_reserved_pages = 3;
  return o;
}

/// Local memory whose records nobody reads, for tests to stand in the way of one call or another.
class OverLocal : public Backing {
 public:
  explicit OverLocal(std::shared_ptr<Range> range) : inner_(std::move(range)) {}

  Status map(std::span<const PageIndex> pages) override { return inner_.map(pages); }
  Status unmap(std::span<const PageIndex> pages) override { return inner_.unmap(pages); }
  bool works_behind() const override { return false; }
  Status drain() override { return ok(); }
  Status copy(std::span<const BlockMove> moves) override { return inner_.copy(moves); }
  Status copy_records(std::span<const BlockSlot>, const std::shared_ptr<Staging>&,
                      CopyTo) override {
    return ok();
  }
  std::vector<std::optional<DeviceMemory>> device_memory() override { return {}; }

 private:
  LocalBacking inner_;
};

/// Its maps wait until the test lets them go on.
class GatedBacking final : public OverLocal {
 public:
  using OverLocal::OverLocal;

  Status map(std::span<const PageIndex> pages) override {
    arrived_.release();
    open_.acquire();
    if (fails) return Error{Errc::kOutOfMemory, "the test wants no page"};
    return OverLocal::map(pages);
  }

  std::atomic<bool> fails = false;

  /// Returns when a map has begun and waits.
  void wait_for_a_map() { arrived_.acquire(); }
  void let_it_go_on() { open_.release(); }

 private:
  std::counting_semaphore<> arrived_{0}, open_{0};
};

/// Allocs, caches, touches and frees at random; no two threads may ever hold the same block.
void work(Pool& pool, std::uint32_t seed, std::vector<std::atomic<int>>& owners, int steps) {
  std::mt19937 random(seed);
  std::vector<BlockId> mine;
  for (int step = 0; step < steps; ++step) {
    if (random() % 2 == 0) {
      auto ids = pool.allocator.alloc(1 + random() % 12);
      CHECK(static_cast<bool>(ids));
      if (!ids || !*ids) continue;
      for (const BlockId id : **ids) {
        CHECK(owners[static_cast<std::size_t>(id)].exchange(1) == 0);
        mine.push_back(id);
      }
    } else if (!mine.empty()) {
      std::vector<BlockId> some(
          mine.end() - static_cast<std::ptrdiff_t>(1 + random() % mine.size()), mine.end());
      mine.resize(mine.size() - some.size());
      for (const BlockId id : some) owners[static_cast<std::size_t>(id)] = 0;
      if (random() % 3 == 0) {
        CHECK(static_cast<bool>(
            pool.allocator.cache(some)));  // nobody's from here on: evicted some time
      } else {
        CHECK(static_cast<bool>(pool.allocator.free(some)));
      }
    }
    if (step % 64 == 0) {
      (void)pool.background.trim();
      (void)pool.allocator.take_changes();
    }
  }
  for (const BlockId id : mine) owners[static_cast<std::size_t>(id)] = 0;
  CHECK(static_cast<bool>(pool.allocator.free(mine)));
}

void hammer(Pool& pool, int threads, int steps) {
  std::vector<std::atomic<int>> owners(kPages * kBlocksPerPage + 1);
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] { work(pool, static_cast<std::uint32_t>(i + 1), owners, steps); });
  }
  for (int i = 0; i < 50; ++i) {
    (void)pool.limits.set((1 + i % kPages) * kPage);
    (void)pool.limits.enforce();
    (void)pool.background.provision();
    pool.state.session.lock();
    const std::uint64_t there = pool.state.available_mapped();
    CHECK(there <= kPages * kBlocksPerPage);
    pool.state.session.unlock();
  }
  (void)pool.limits.set(kPages * kPage);
  for (std::thread& worker : workers) worker.join();
  const Status sound = pool.check_integrity();
  CHECK(static_cast<bool>(sound));
  CHECK(pool.state.stats().blocks_used == 0);
}

}  // namespace

TEST(pool_threads_over_local_memory) {
  auto range = host_range(geometry());
  auto pool = Pool::create(geometry(), std::make_shared<LocalBacking>(range), options());
  REQUIRE(static_cast<bool>(pool));
  hammer(**pool, 4, 300);
  CHECK((*pool)->state.limit_state().mapped_bytes == range->mapped_pages() * kPage);
  CHECK(static_cast<bool>(range->check_integrity()));
}

TEST(pool_threads_over_ring_with_maintenance_thread) {
  auto segment = std::make_unique<Segment>();
  REQUIRE(segment->owner != nullptr);
  auto ring = RingBacking::create(segment->owner->ring_area(), geometry(), 1,
                                  std::chrono::seconds(60), nullptr);
  REQUIRE(static_cast<bool>(ring));
  auto range = host_range(geometry());
  auto worker = RingWorker::start(segment->owner->ring_area(), range, 0, nullptr);
  REQUIRE(static_cast<bool>(worker));
  std::shared_ptr<RingBacking> backing = *std::move(ring);
  CHECK(static_cast<bool>(backing->wait_for_workers(std::chrono::seconds(10))));
  auto made = Pool::create(geometry(), backing, options());
  REQUIRE(static_cast<bool>(made));
  std::shared_ptr<Pool> pool = *std::move(made);
  {
    std::shared_ptr<ControlBlockOwner> control_block(segment->owner.get(),
                                                     [](ControlBlockOwner*) {});
    MaintenanceOptions quick;
    quick.idle_trim = std::chrono::milliseconds(1);
    auto maintenance = MaintenanceThread::start(pool, control_block, quick);
    hammer(*pool, 3, 200);
    maintenance->stop();
  }
  CHECK(pool->state.limit_state().mapped_bytes == range->mapped_pages() * kPage);
  (*worker)->stop();
}

TEST(pages_arriving_over_limit_wake_maintenance_thread) {
  auto range = host_range(geometry());
  auto backing = std::make_shared<GatedBacking>(range);
  auto made = Pool::create(geometry(), backing, options());
  REQUIRE(static_cast<bool>(made));
  Pool& pool = **made;
  std::atomic<int> calls = 0;
  pool.background.on_work([&] { ++calls; });
  // A parked page before, so that the maintenance thread has been called for decay already; with
  // the idle trim off it never asks to be called for that again.
  backing->let_it_go_on();
  CHECK(static_cast<bool>(pool.allocator.ensure(2 * kBlocksPerPage - 1)));
  backing->wait_for_a_map();
  std::thread engine([&] { (void)pool.allocator.ensure(kPages * kBlocksPerPage - 1); });
  backing->wait_for_a_map();
  // The maintenance thread lowers the limit while the others are on their way: they cannot be given
  // back yet.
  (void)pool.limits.set(kPage);
  Result<LimitState> meanwhile = pool.limits.enforce();
  REQUIRE(static_cast<bool>(meanwhile));
  CHECK(meanwhile->over_bytes == (kPages - 2) * kPage);
  const int before = calls;
  backing->let_it_go_on();
  engine.join();
  CHECK(pool.state.stats().pages_parked == kPages - 2);
  CHECK(calls > before);
  Result<LimitState> done = pool.limits.enforce();
  CHECK(done && done->over_bytes == 0);
  // Nothing is left to do: another look does not call the maintenance thread again, or it would
  // never rest.
  const int rest = calls;
  CHECK(static_cast<bool>(pool.limits.enforce()));
  CHECK(calls == rest);
  pool.background.on_work(nullptr);
}

TEST(no_page_is_mapped_before_the_null_block) {
  auto backing = std::make_shared<GatedBacking>(host_range(geometry()));
  auto made = Pool::create(geometry(), backing, options());
  REQUIRE(static_cast<bool>(made));
  Pool& pool = **made;
  const auto mappable_pages = [&] {
    return PoolState::Look(pool.state)->accounting.mappable_pages();
  };
  CHECK(mappable_pages() == kPages);
  std::thread engine([&] { (void)pool.allocator.ensure(1); });
  backing->wait_for_a_map();
  CHECK(mappable_pages() == 0);
  backing->fails = true;
  backing->let_it_go_on();
  engine.join();
  CHECK(mappable_pages() == kPages);
}

/// Its loads wait until the test lets them go on.
class GatedLoads final : public OverLocal {
 public:
  using OverLocal::OverLocal;

  Status map(std::span<const PageIndex> pages) override {
    if (at_map) std::exchange(at_map, nullptr)();
    return OverLocal::map(pages);
  }
  Status copy_records(std::span<const BlockSlot>, const std::shared_ptr<Staging>&,
                      CopyTo) override {
    arrived_.release();
    open_.acquire();
    return ok();
  }

  void wait_for_a_load() { arrived_.acquire(); }
  void let_it_go_on() { open_.release(); }

  std::function<void()> at_map;  ///< called once, by the next map

 private:
  std::counting_semaphore<> arrived_{0}, open_{0};
};

TEST(preallocated_pages_wait_for_loads) {
  const Geometry large = one_buffer(kPages, kBlocksPerPage, kFirstBatchBytes);  // a page is a batch
  auto backing = std::make_shared<GatedLoads>(host_range(large));
  PoolOptions wants = options();
  wants.limit_bytes = wants.capacity_bytes = kPages * large.extent_bytes;
  wants.min_reserved_pages = 3;
  auto made = Pool::create(large, backing, wants);
  REQUIRE(static_cast<bool>(made));
  Pool& pool = **made;
  auto staged = Staging::create(1, pool.writeback.record_bytes());
  REQUIRE(static_cast<bool>(staged));
  const std::shared_ptr<Staging> staging = *std::move(staged);
  pool.background.on_work([] {});
  const auto ids = pool.allocator.alloc(kBlocksPerPage);
  REQUIRE(ids && *ids);
  CHECK(pool.background.is_provision_due());
  const std::uint64_t before = pool.state.limit_state().mapped_bytes;
  const auto came = [&] {
    return (pool.state.limit_state().mapped_bytes - before) / large.extent_bytes;
  };
  const auto provision_after_loads = [&] {
    Result<std::uint64_t> mapped = pool.background.provision();
    while (mapped && *mapped == 0)
      mapped = pool.background.provision();  // more loads might follow the last
    CHECK(static_cast<bool>(mapped));
  };
  std::thread loading;
  const auto load = [&] {
    loading = std::thread([&] {
      const BlockSlot one{(*ids)->front(), 0};
      CHECK(static_cast<bool>(pool.writeback.copy_records({&one, 1}, staging, CopyTo::kDevice)));
    });
    backing->wait_for_a_load();
  };
  const auto end_load = [&] {
    backing->let_it_go_on();
    loading.join();
  };

  load();
  const Result<std::uint64_t> mapped = pool.background.provision();
  CHECK(mapped && *mapped == 0 && pool.background.is_provision_due() && came() == 0);
  end_load();
  // A load that comes in the midst waits for one batch, and the rest is left for later.
  backing->at_map = load;
  provision_after_loads();
  CHECK(came() == 1 && pool.background.is_provision_due());
  end_load();
  provision_after_loads();
  CHECK(came() == 3 && !pool.background.is_provision_due());
  CHECK(static_cast<bool>(pool.check_integrity()));
  pool.background.on_work(nullptr);
}

TEST(trim_cancels_pending_preallocation) {
  auto made =
      Pool::create(geometry(), std::make_shared<LocalBacking>(host_range(geometry())), options());
  REQUIRE(static_cast<bool>(made));
  Pool& pool = **made;
  pool.background.on_work([] {});
  const auto ids = pool.allocator.alloc(kBlocksPerPage);
  REQUIRE(ids && *ids);
  REQUIRE(pool.background.is_provision_due());
  CHECK(static_cast<bool>(pool.background.trim()));
  const Result<std::uint64_t> mapped = pool.background.provision();
  CHECK(mapped && *mapped == 0);
  pool.background.on_work(nullptr);
}

/// A device that works behind the calls, which counts the pages of each.
class CountedCalls final : public OverLocal {
 public:
  using OverLocal::OverLocal;

  bool works_behind() const override { return true; }
  Status map(std::span<const PageIndex> pages) override {
    mapped.push_back(pages.size());
    return OverLocal::map(pages);
  }
  Status unmap(std::span<const PageIndex> pages) override {
    unmapped.push_back(pages.size());
    return OverLocal::unmap(pages);
  }

  std::vector<std::size_t> mapped, unmapped;
};

TEST(gpu_call_maps_at_most_16_handles) {
  const Geometry many = one_buffer(50, kBlocksPerPage);
  auto backing = std::make_shared<CountedCalls>(host_range(many));
  PoolOptions wants = options();
  wants.max_blocks = many.pages * kBlocksPerPage;
  wants.limit_bytes = wants.capacity_bytes = many.pages * many.extent_bytes;
  wants.preallocate = false;
  auto made = Pool::create(many, backing, wants);
  REQUIRE(static_cast<bool>(made));
  const auto ids = (*made)->allocator.alloc((many.pages - 1) * kBlocksPerPage);
  REQUIRE(ids && *ids);
  CHECK(std::ranges::max(backing->mapped) == 16);
  CHECK(static_cast<bool>((*made)->allocator.free(**ids)));
  CHECK(static_cast<bool>((*made)->background.trim()));
  CHECK(std::ranges::max(backing->unmapped) == 16);
}

/// Memory whose books find no memory themselves.
class ThrowingBacking final : public OverLocal {
 public:
  using OverLocal::OverLocal;

  Status unmap(std::span<const PageIndex> pages) override {
    if (throws > 0) {
      --throws;
      throw std::bad_alloc();
    }
    return OverLocal::unmap(pages);
  }

  std::atomic<int> throws = 0;
};

/// Memory that the machine has or has not, as the test says.
class ScarceBacking final : public OverLocal {
 public:
  using OverLocal::OverLocal;

  Status map(std::span<const PageIndex> pages) override {
    if (is_scarce) return Error{Errc::kOutOfMemory, "no memory now"};
    return OverLocal::map(pages);
  }

  std::atomic<bool> is_scarce = false;
};

TEST(refused_first_page_is_notified_of_free_memory) {
  auto segment = std::make_unique<Segment>();
  REQUIRE(segment->owner != nullptr);
  auto backing = std::make_shared<ScarceBacking>(host_range(geometry()));
  PoolOptions without_page_ahead = options();
  without_page_ahead.preallocate = false;
  auto made = Pool::create(geometry(), backing, without_page_ahead);
  REQUIRE(static_cast<bool>(made));
  std::shared_ptr<Pool> pool = *std::move(made);
  CHECK(static_cast<bool>(pool->allocator.ensure(kBlocksPerPage - 1)));
  std::shared_ptr<ControlBlockOwner> control_block(segment->owner.get(), [](ControlBlockOwner*) {});
  MaintenanceOptions watching;
  watching.watch_memory = true;
  auto maintenance = MaintenanceThread::start(pool, control_block, watching);
  backing->is_scarce = true;
  const std::uint32_t seen = pool->state.epoch();
  const auto refused = pool->allocator.alloc(kBlocksPerPage);
  CHECK(refused && !*refused);
  backing->is_scarce = false;
  CHECK(pool->allocator.wait_for_epoch(seen, std::chrono::minutes(1)) != seen);
  const auto granted = pool->allocator.alloc(kBlocksPerPage);
  CHECK(granted && *granted);
  maintenance->stop();
}

TEST(maintenance_thread_survives_bad_alloc) {
  auto segment = std::make_unique<Segment>();
  REQUIRE(segment->owner != nullptr);
  auto range = host_range(geometry());
  auto backing = std::make_shared<ThrowingBacking>(range);
  auto made = Pool::create(geometry(), backing, options());
  REQUIRE(static_cast<bool>(made));
  std::shared_ptr<Pool> pool = *std::move(made);
  CHECK(static_cast<bool>(pool->allocator.ensure(kPages * kBlocksPerPage - 1)));
  std::shared_ptr<ControlBlockOwner> control_block(segment->owner.get(), [](ControlBlockOwner*) {});
  auto maintenance = MaintenanceThread::start(pool, control_block, {});
  backing->throws = 3;
  auto writer = RequestWriter::open(segment->bytes);
  REQUIRE(static_cast<bool>(writer));
  RequestChange change;
  change.limit_bytes = kPage;
  const std::uint64_t revision = writer->write(change);
  auto view = ControlBlockView::open(segment->bytes);
  REQUIRE(static_cast<bool>(view));
  CHECK(view->wait_ack(revision, true, 60'000'000'000));
  CHECK(backing->throws == 0);
  CHECK(pool->state.limit_state().mapped_bytes == kPage);
  CHECK(static_cast<bool>(pool->check_integrity()));
  maintenance->stop();
}

TEST(reclaim_drops_reservations) {
  auto range = host_range(geometry());
  auto made = Pool::create(geometry(), std::make_shared<LocalBacking>(range), options());
  REQUIRE(static_cast<bool>(made));
  Pool& pool = **made;
  Result<bool> reserved = pool.allocator.try_to_reserve(kPages * kBlocksPerPage - 1);
  REQUIRE(reserved && *reserved);
  Result<std::uint64_t> parked = pool.background.give_up(2, Depth::kParked, 0);
  CHECK(parked && *parked == 0);
  CHECK(pool.state.stats().blocks_reserved > 0);
  Result<std::uint64_t> given = pool.background.give_up(2, Depth::kCached, 0);
  CHECK(given && *given == 2);
  CHECK(pool.state.stats().blocks_reserved == 0);
  CHECK(static_cast<bool>(pool.check_integrity()));
}

TEST(maintenance_thread_backs_off_after_driver_failure) {
  auto host = HostDriver::open();
  REQUIRE(static_cast<bool>(host));
  auto driver = std::make_shared<FaultDriver>(std::shared_ptr<Driver>(*std::move(host)));
  auto reserved = Range::reserve(driver, geometry());
  REQUIRE(static_cast<bool>(reserved));
  std::shared_ptr<Range> range = *std::move(reserved);
  auto made = Pool::create(geometry(), std::make_shared<LocalBacking>(range), options());
  REQUIRE(static_cast<bool>(made));
  Pool& pool = **made;
  CHECK(static_cast<bool>(pool.allocator.ensure(kPages * kBlocksPerPage - 1)));
  std::atomic<int> calls = 0;
  pool.background.on_work([&] { ++calls; });
  (void)pool.limits.set(kPage);
  driver->arm(1, 1U << 30);
  (void)pool.limits.enforce();
  const int before = calls;
  CHECK(before > 0);
  for (int i = 0; i < 10; ++i) CHECK(!pool.limits.enforce());
  CHECK(calls == before);  // the maintenance thread tries again in its own time
  driver->arm(0, 0);
  Result<LimitState> done = pool.limits.enforce();
  CHECK(done && done->over_bytes == 0);
  pool.background.on_work(nullptr);
}

TEST(ring_refuses_mismatched_layouts_and_areas) {
  auto segment = std::make_unique<Segment>();
  REQUIRE(segment->owner != nullptr);
  const std::span<std::byte> area = segment->owner->ring_area();
  auto range = host_range(geometry());
  CHECK(!RingWorker::start(area, range, 0, nullptr));  // no ring there yet
  CHECK(!RingBacking::create(area.first(64), geometry(), 1, kForever, nullptr));
  CHECK(!RingBacking::create(area.subspan(8), geometry(), 1, kForever, nullptr));
  Geometry other = geometry();
  other.pages += 1;
  auto ring = RingBacking::create(area, other, 1, std::chrono::milliseconds(50), nullptr);
  REQUIRE(static_cast<bool>(ring));
  CHECK(!RingWorker::start(area, range, 0, nullptr));  // another layout
  CHECK((*ring)->wait_for_workers(std::chrono::milliseconds(1)).error().code ==
        Errc::kChannelTimeout);
  const PageIndex page = 0;
  CHECK((*ring)->map({&page, 1}).error().code == Errc::kChannelClosed);  // no worker ever came
}

TEST(alloc_chooses_the_fullest_page_that_fits) {
  auto made = Blocks::create(geometry());
  REQUIRE(static_cast<bool>(made));
  Blocks& blocks = **made;
  for (int i = 0; i < 3; ++i) blocks.add_page(*blocks.take_unmapped());
  std::vector<BlockId> ids;
  blocks.alloc(3 * kBlocksPerPage - 1, Blocks::Fit::kBest, ids);
  CHECK(blocks.free_blocks() == 0);
  CHECK(std::set<BlockId>(ids.begin(), ids.end()).size() == ids.size());
  // Give back 2 of page 0, 5 of page 1 and 9 of page 2.
  const auto give = [&](PageIndex page, std::size_t count) {
    std::vector<BlockId> some;
    for (const BlockId id : ids) {
      if (id / static_cast<BlockId>(kBlocksPerPage) == page && some.size() < count) {
        some.push_back(id);
      }
    }
    CHECK(static_cast<bool>(blocks.free(some)));
  };
  give(0, 2);
  give(1, 5);
  give(2, 9);
  const auto page_taken = [&](std::size_t count, Blocks::Fit fit) {
    std::vector<BlockId> got;
    blocks.alloc(count, fit, got);
    return got.front() / static_cast<BlockId>(kBlocksPerPage);
  };
  CHECK(page_taken(3, Blocks::Fit::kBest) == 1);     // the fullest with room for 3
  CHECK(page_taken(1, Blocks::Fit::kBest) == 0);     // 2 free there, and on page 1 too: first come
  CHECK(page_taken(6, Blocks::Fit::kBest) == 2);     // only there is room for 6
  CHECK(page_taken(1, Blocks::Fit::kFullest) == 0);  // one left there
  CHECK(static_cast<bool>(blocks.check_integrity()));
}

TEST(eviction_takes_cheapest_page_and_oldest_block) {
  auto made = Blocks::create(geometry());
  REQUIRE(static_cast<bool>(made));
  Blocks& blocks = **made;
  for (int i = 0; i < 3; ++i) blocks.add_page(*blocks.take_unmapped());
  std::vector<BlockId> ids;
  blocks.alloc(3 * kBlocksPerPage - 1, Blocks::Fit::kBest, ids);
  const auto of_page = [&](PageIndex page) {
    std::vector<BlockId> some;
    for (const BlockId id : ids) {
      if (id / static_cast<BlockId>(kBlocksPerPage) == page) some.push_back(id);
    }
    return some;
  };
  std::vector<BlockId> one = of_page(1), two = of_page(2);
  CHECK(static_cast<bool>(blocks.free(std::span(two).first(10))));
  CHECK(static_cast<bool>(blocks.cache(one)));
  CHECK(static_cast<bool>(blocks.cache(std::span(two).subspan(10))));
  CHECK(blocks.cheapest_page_cost() == 6U);
  std::vector<EvictedBlock> evicted;
  CHECK(blocks.evict_oldest_block(evicted));
  CHECK(evicted.size() == 1 && evicted.front().id == one.front());
  evicted.clear();
  CHECK(blocks.evict_cheapest_page(evicted));
  CHECK(evicted.size() == 6 && evicted.front().id == two[10]);
  CHECK(blocks.parked_pages() == 1);
  CHECK(blocks.touch(std::span(two).subspan(10, 1)).error().code == Errc::kDoubleFree);
  CHECK(static_cast<bool>(blocks.check_integrity()));
}

}  // namespace kvelastic
