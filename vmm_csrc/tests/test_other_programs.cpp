// What other programs hold of a GPU, while members' pages come and go: the driver's figure and the
// ledger's are of two moments, and each test looks in one of the windows between them.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <memory>
#include <semaphore>
#include <utility>
#include <vector>

#include "check.h"
#include "driver/host_driver.h"
#include "ledger/device_set.h"
#include "ledger_fixture.h"
#include "pool/maintenance_thread.h"
#include "pool/pool.h"
#include "pool_fixture.h"
#include "segment/ring_backing.h"
#include "segment/ring_worker.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kTotalPages = 80;
constexpr std::uint64_t kOtherPages = 5;

/// A GPU as its driver shows it, and one who looks at it.
struct Gpu {
  std::uint64_t used_pages = kOtherPages;

  DeviceMemory memory() const { return {kTotalPages * kPage, (kTotalPages - used_pages) * kPage}; }
  Sight show(LedgerMember& member) const {
    const LedgerMember::Moment now = member.moment();
    return member.see_device(now, memory().total_bytes, memory().free_bytes);
  }
};

bool has_others(Ledger& ledger, std::uint64_t pages) {
  return ledger.layout().others_bytes == pages * kPage;
}

/// Pages of a GPU that nobody reads, and a look at each moment at which its driver has just done
/// something that no ledger knows yet.
class LookedAt final : public Backing {
 public:
  LookedAt(Gpu& gpu, std::function<void()> look) : gpu_(gpu), look_(std::move(look)) {}

  Status map(std::span<const PageIndex> pages) override {
    look_();
    if (fails) return Error{Errc::kOutOfMemory, "no"};
    gpu_.used_pages += pages.size();
    look_();
    return ok();
  }
  Status unmap(std::span<const PageIndex> pages) override {
    look_();
    if (fails) return Error{Errc::kMapping, "no"};
    gpu_.used_pages -= pages.size();
    look_();
    return ok();
  }
  bool works_behind() const override { return true; }
  Status drain() override {
    look_();
    return ok();
  }
  Status copy(std::span<const BlockMove>) override { return ok(); }
  Status copy_records(std::span<const BlockSlot>, const std::shared_ptr<Staging>&,
                      CopyTo) override {
    return ok();
  }
  std::vector<std::optional<DeviceMemory>> device_memory() override {
    ++device_looks;
    if (!tells_memory) return {std::nullopt};
    return {gpu_.memory()};
  }

  std::atomic<bool> fails = false;
  std::atomic<bool> tells_memory = true;
  std::atomic<int> device_looks = 0;

 private:
  Gpu& gpu_;
  const std::function<void()> look_;
};

/// Pages of the host that pass for a GPU's, whose driver answers when the test lets it.
class GatedGpu final : public Driver {
 public:
  explicit GatedGpu(std::shared_ptr<Driver> inner) : inner_(std::move(inner)) {}

  std::optional<DeviceMemory> memory() const override {
    ++looks;
    if (waits) open_.acquire();
    return DeviceMemory{kTotalPages * kPage, free_pages * kPage};
  }
  void let_it_answer() {
    waits = false;
    open_.release();
  }

  std::atomic<std::uint64_t> free_pages{kTotalPages};
  std::atomic<bool> waits{false};
  mutable std::atomic<int> looks{0};
  std::function<void()> after_unmap{};

  bool works_behind() const override { return true; }
  std::size_t granularity_bytes() const override { return inner_->granularity_bytes(); }
  DeviceKind device() const override { return inner_->device(); }
  Result<std::byte*> reserve(std::size_t bytes) override { return inner_->reserve(bytes); }
  Status release(std::byte* at, std::size_t bytes) override { return inner_->release(at, bytes); }
  Result<Handle> create(std::size_t bytes) override { return inner_->create(bytes); }
  Status destroy(Handle handle, std::size_t bytes) override {
    return inner_->destroy(handle, bytes);
  }
  Status map(std::byte* at, std::size_t bytes, Handle handle) override {
    return inner_->map(at, bytes, handle);
  }
  Status set_access(std::byte* at, std::size_t bytes) override {
    return inner_->set_access(at, bytes);
  }
  Status unmap(std::byte* at, std::size_t bytes) override {
    Status done = inner_->unmap(at, bytes);
    if (after_unmap) after_unmap();
    return done;
  }
  Status copy(std::span<const CopyRun> runs) override { return inner_->copy(runs); }
  Status copy_host(std::span<const HostCopy> copies, CopyTo to) override {
    return inner_->copy_host(copies, to);
  }
  DriverStats stats() const override { return inner_->stats(); }

 private:
  const std::shared_ptr<Driver> inner_;
  mutable std::counting_semaphore<> open_{0};
};

Geometry one_block_a_page(std::uint64_t pages, std::uint64_t page_bytes) {
  Geometry geometry;
  geometry.pages = pages;
  geometry.extent_bytes = page_bytes;
  geometry.block_bytes = page_bytes;
  geometry.blocks_per_page = 1;
  return geometry;
}

std::shared_ptr<Pool> make_pool(std::shared_ptr<Backing> backing,
                                std::shared_ptr<LedgerMember> member, std::uint64_t page_bytes) {
  PoolOptions options;
  options.max_blocks = kPages;
  options.limit_bytes = kPages * page_bytes;
  auto device_set = DeviceSet::create({{std::move(member), {0}}}, page_bytes);
  if (!device_set) return nullptr;
  auto made = Pool::create(one_block_a_page(kPages, page_bytes), std::move(backing), options,
                           *std::move(device_set));
  return made ? std::shared_ptr<Pool>(*std::move(made)) : nullptr;
}

}  // namespace

TEST(range_can_be_destroyed_in_forked_child) {
  auto host = HostDriver::open();
  REQUIRE(static_cast<bool>(host));
  auto gpu = std::make_shared<GatedGpu>(std::shared_ptr<Driver>(*std::move(host)));
  auto range = Range::reserve(gpu, one_block_a_page(2, HostDriver::kGranularityBytes));
  REQUIRE(static_cast<bool>(range));
  const std::array<PageIndex, 1> page{0};
  REQUIRE((*range)->map(page));
  pid_t child = 0;
  gpu->after_unmap = [&] {
    if (child != 0) return;
    child = ::fork();
    if (child == 0) {  // with the range's lock held
      ::alarm(60);
      range->reset();
      ::_exit(0);
    }
  };
  CHECK((*range)->unmap(page, Afterwards::kDestroy));
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
}

TEST(foreign_usage_is_unchanged_while_pages_arrive) {
  Ledger ledger;
  Gpu gpu;
  auto mine = ledger.join(), neighbour = ledger.join();
  REQUIRE(mine && neighbour);
  CHECK(gpu.show(*neighbour) == Sight::kExact && has_others(ledger, kOtherPages));
  CHECK(mine->grant(20, kPage) == 20);
  CHECK(gpu.show(*neighbour) == Sight::kBounded && has_others(ledger, kOtherPages));
  gpu.used_pages += 20;
  CHECK(gpu.show(*neighbour) == Sight::kBounded && has_others(ledger, kOtherPages));
  mine->arrived(20, kPage);
  CHECK(gpu.show(*neighbour) == Sight::kExact && has_others(ledger, kOtherPages));
}

TEST(foreign_usage_is_unchanged_while_pages_leave) {
  Ledger ledger;
  Gpu gpu;
  auto mine = ledger.join(), neighbour = ledger.join();
  REQUIRE(mine && neighbour && mine->grant(20, kPage) == 20);
  mine->arrived(20, kPage);
  gpu.used_pages += 20;
  CHECK(gpu.show(*neighbour) == Sight::kExact && has_others(ledger, kOtherPages));
  mine->leaving(15, kPage);
  CHECK(gpu.show(*neighbour) == Sight::kBounded && has_others(ledger, kOtherPages));
  gpu.used_pages -= 15;
  CHECK(gpu.show(*neighbour) == Sight::kBounded && has_others(ledger, kOtherPages));
  mine->give_back(15, kPage);
  CHECK(gpu.show(*neighbour) == Sight::kExact && has_others(ledger, kOtherPages));
  CHECK(neighbour->room(kPage) == kPages - 5 - kOtherPages);
}

/// What a giver had emptied, and what the requester had, before each of its driver's unmaps.
struct Handover {
  std::vector<std::uint64_t> cached, room;
  std::vector<std::uint32_t> bells;
  std::uint64_t drains = 0;
};

class Observed final : public Backing {
 public:
  Status map(std::span<const PageIndex>) override { return ok(); }
  Status unmap(std::span<const PageIndex>) override {
    before_unmap();
    return ok();
  }
  bool works_behind() const override { return true; }
  Status drain() override {
    ++drains;
    return ok();
  }
  Status copy(std::span<const BlockMove>) override { return ok(); }
  Status copy_records(std::span<const BlockSlot>, const std::shared_ptr<Staging>&,
                      CopyTo) override {
    return ok();
  }
  std::vector<std::optional<DeviceMemory>> device_memory() override { return {}; }

  std::function<void()> before_unmap = [] {};
  std::uint64_t drains = 0;
};

/// 41 pages of cached blocks, of which a neighbour takes 40.
Handover hand_over(bool giver_is_busy) {
  Handover seen;
  Ledger ledger;
  auto giver = ledger.join();
  const auto requester = ledger.join();
  auto backing = std::make_shared<Observed>();
  const std::shared_ptr<Pool> pool = make_pool(backing, std::move(giver), kPage);
  if (!CHECK(pool != nullptr && requester != nullptr)) return seen;
  const auto ids = pool->allocator.alloc(41);
  if (!CHECK(ids && *ids && pool->allocator.cache(**ids))) return seen;
  pool->state.device_set->report_busy(giver_is_busy);
  (void)requester->request_memory(kPages * kPage);
  backing->drains = 0;
  backing->before_unmap = [&] {
    seen.cached.push_back(pool->state.stats().blocks_cached);
    seen.room.push_back(requester->room(kPage));
    seen.bells.push_back(requester->bell());
  };
  const auto given = pool->background.give_up(40, Depth::kCached, 0);
  CHECK(given && *given == 40);
  backing->before_unmap = [] {};
  seen.drains = backing->drains;
  CHECK(static_cast<bool>(pool->check_integrity()));
  return seen;
}

TEST(idle_neighbour_releases_its_first_pages_alone) {
  const Handover seen = hand_over(false);
  REQUIRE(seen.cached.size() > 2);
  constexpr std::uint64_t kFirst = kFirstBatchBytes / kPage;
  CHECK(seen.cached[0] == 41 - kFirst);
  CHECK(seen.room[1] == seen.room[0] + kFirst);
  CHECK(seen.bells[1] != seen.bells[0]);  // the requester is awake before the second batch
  CHECK(seen.cached[1] == 1);
}

TEST(busy_neighbour_releases_pages_together) {
  const Handover seen = hand_over(true);
  REQUIRE(!seen.cached.empty());
  CHECK(seen.cached[0] == 1 && seen.drains == 1);
}

TEST(foreign_growth_is_seen_after_pages_arrive) {
  Ledger ledger;
  Gpu gpu;
  auto mine = ledger.join();
  REQUIRE(mine && mine->grant(20, kPage) == 20);
  gpu.used_pages += 30;  // 30 of whomever: ten more than what is on its way can be
  CHECK(gpu.show(*mine) == Sight::kBounded && has_others(ledger, kOtherPages + 10));
  gpu.used_pages += 20;
  mine->arrived(20, kPage);
  CHECK(gpu.show(*mine) == Sight::kExact && has_others(ledger, kOtherPages + 30));
}

TEST(foreign_usage_ignores_samples_during_changes) {
  Ledger ledger;
  Gpu gpu;
  auto mine = ledger.join(), neighbour = ledger.join();
  REQUIRE(mine && neighbour && mine->grant(20, kPage) == 20);
  mine->arrived(20, kPage);
  gpu.used_pages += 20;
  CHECK(gpu.show(*neighbour) == Sight::kExact);
  const auto without_them = [&] {
    mine->leaving(20, kPage);
    mine->give_back(20, kPage);
  };
  const auto back_again = [&] {
    without_them();
    CHECK(mine->grant(20, kPage) == 20);
    mine->arrived(20, kPage);
  };
  const auto asleep = [&] { neighbour->fall_asleep(); };
  const auto one_more = [&] { CHECK(ledger.join() != nullptr); };
  CHECK(static_cast<bool>(neighbour->claim_reserve(kPage)));
  for (const std::function<void()>& change :
       {std::function<void()>(back_again), std::function<void()>(asleep),
        std::function<void()>(one_more), std::function<void()>(without_them)}) {
    const LedgerMember::Moment before = neighbour->moment();
    change();
    CHECK(neighbour->see_device(before, kTotalPages * kPage, 0) == Sight::kChanged);
    CHECK(has_others(ledger, kOtherPages));
  }
}

TEST(foreign_usage_is_sampled_again_after_a_change) {
  Ledger ledger;
  Gpu gpu;
  std::shared_ptr<LedgerMember> mine = ledger.join();
  auto neighbour = ledger.join();
  REQUIRE(mine && neighbour && neighbour->grant(40, kPage) == 40);
  neighbour->arrived(40, kPage);
  gpu.used_pages += 40;
  auto device_set = DeviceSet::create({{mine, {0}}}, kPage);
  REQUIRE(static_cast<bool>(device_set));
  // The driver has answered, and much is given back before that counts.
  int looks = 0;
  const auto look = [&] {
    const DeviceMemory seen = gpu.memory();
    if (++looks == 1) {
      neighbour->leaving(10, kPage);
      gpu.used_pages -= 10;
      neighbour->give_back(10, kPage);
    }
    return std::vector<std::optional<DeviceMemory>>{seen};
  };
  CHECK((*device_set)->see_devices(look) == Sight::kExact && looks == 2);
  CHECK(has_others(ledger, kOtherPages));
  // Where that goes on and on, the last certain look stands.
  const auto restless = [&] {
    neighbour->leaving(1, kPage);
    neighbour->arrived(1, kPage);
    return std::vector<std::optional<DeviceMemory>>{gpu.memory()};
  };
  CHECK((*device_set)->see_devices(restless) == Sight::kChanged);
  CHECK(has_others(ledger, kOtherPages));
  CHECK((*device_set)->see_devices([] {
    return std::vector<std::optional<DeviceMemory>>{std::nullopt};
  }) == Sight::kNone);
}

TEST(foreign_usage_is_stable_while_pool_resizes) {
  Ledger ledger;
  Gpu gpu;
  auto neighbour = ledger.join();
  REQUIRE(neighbour != nullptr);
  CHECK(gpu.show(*neighbour) == Sight::kExact);
  int looks = 0;
  auto backing = std::make_shared<LookedAt>(gpu, [&] {
    ++looks;
    (void)gpu.show(*neighbour);
    CHECK(has_others(ledger, kOtherPages));
  });
  auto pool = make_pool(backing, ledger.join(), kPage);
  REQUIRE(pool != nullptr);
  const auto is_exact_now = [&] {
    return gpu.show(*neighbour) == Sight::kExact && has_others(ledger, kOtherPages);
  };
  auto ids = pool->allocator.alloc(40);
  REQUIRE(static_cast<bool>(ids) && *ids && looks > 0);
  CHECK(is_exact_now());
  backing->fails = true;
  (void)pool->allocator.ensure(50);
  CHECK(is_exact_now());
  CHECK(static_cast<bool>(pool->allocator.free(**ids)));
  CHECK(!pool->background.trim());
  CHECK(is_exact_now());
  backing->fails = false;
  auto trimmed = pool->background.trim();
  CHECK(trimmed && *trimmed >= 39);
  CHECK(is_exact_now());
}

TEST(foreign_usage_is_sampled_after_large_changes) {
  constexpr std::uint64_t kLargePage = kLargeMoveBytes / 4;
  Ledger ledger(kPages * kLargePage);
  Gpu gpu;
  auto pool = make_pool(std::make_shared<LookedAt>(gpu, [] {}), ledger.join(), kLargePage);
  REQUIRE(pool != nullptr);
  int calls = 0;
  pool->background.on_work([&] { ++calls; });
  auto ids = pool->allocator.alloc(2);  // and the null block's page
  REQUIRE(static_cast<bool>(ids) && *ids);
  CHECK(!pool->background.take_large_move());
  const int before = calls;
  auto more = pool->allocator.alloc(1);
  REQUIRE(static_cast<bool>(more) && *more);
  CHECK(calls > before);
  CHECK(pool->background.take_large_move() && !pool->background.take_large_move());
  CHECK(static_cast<bool>(pool->allocator.free(**ids)) &&
        static_cast<bool>(pool->allocator.free(**more)));
  CHECK(pool->background.trim() && !pool->background.take_large_move());
  pool->background.on_work(nullptr);
}

TEST(failed_device_look_does_not_end_the_measuring) {
  auto segment = std::make_unique<Segment>();
  Ledger ledger;
  Gpu gpu;
  auto backing = std::make_shared<LookedAt>(gpu, [] {});
  const std::shared_ptr<Pool> pool = make_pool(backing, ledger.join(), kPage);
  REQUIRE(segment->owner != nullptr && pool != nullptr);
  std::shared_ptr<ControlBlockOwner> control_block(segment->owner.get(), [](ControlBlockOwner*) {});
  auto maintenance = MaintenanceThread::start(pool, control_block, {});
  backing->tells_memory = false;
  backing->fails = true;
  const std::uint32_t seen = pool->state.epoch();
  const auto refused = pool->allocator.alloc(4);
  CHECK(refused && !*refused);
  const int before = backing->device_looks;
  CHECK(soon([&] { return backing->device_looks > before; }));  // the refusal makes it look
  backing->fails = false;
  backing->tells_memory = true;
  CHECK(pool->allocator.wait_for_epoch(seen, std::chrono::minutes(1)) != seen);
  maintenance->stop();
}

TEST(slow_worker_delays_no_device_memory_query) {
  alignas(4096) static std::array<std::byte, 192 * 1024> area;
  const Geometry geometry = one_block_a_page(4, kPage);
  auto ring = RingBacking::create(area, geometry, 1, std::chrono::seconds(60), nullptr);
  auto host = HostDriver::open();
  REQUIRE(static_cast<bool>(ring) && static_cast<bool>(host));
  auto gpu = std::make_shared<GatedGpu>(*std::move(host));
  auto range = Range::reserve(gpu, geometry);
  REQUIRE(static_cast<bool>(range));
  auto worker = RingWorker::start(area, *std::move(range), 0, nullptr);
  REQUIRE(static_cast<bool>(worker));
  const auto free_pages = [&] {
    const auto seen = (*ring)->device_memory();
    return seen[0] ? seen[0]->free_bytes / kPage : 0;
  };
  CHECK(soon([&] { return free_pages() == kTotalPages; }));
  gpu->free_pages = 7;  // what is asked for is what is there now
  CHECK(soon([&] { return free_pages() == 7; }));
  const int looks = gpu->looks + 1;
  gpu->waits = true;
  CHECK(free_pages() == 0);
  CHECK(soon([&] { return gpu->looks == looks; }));
  CHECK(free_pages() == 0 && gpu->looks == looks);  // it is not asked twice
  gpu->let_it_answer();
  // It was late with a look, and is as good as before.
  const PageIndex page = 0;
  CHECK(static_cast<bool>((*ring)->map({&page, 1})));
  CHECK(soon([&] { return free_pages() == 7; }));
  (*worker)->stop();
  CHECK(free_pages() == 0);
}

TEST(foreign_usage_is_not_hidden_by_destroyed_ranges) {
  Ledger ledger;
  Gpu shown;
  const Geometry geometry = one_block_a_page(4, kPage);
  std::shared_ptr<LedgerMember> mine = ledger.join();
  auto neighbour = ledger.join();
  auto host = HostDriver::open();
  REQUIRE(mine && neighbour && static_cast<bool>(host) && mine->grant(4, kPage) == 4);
  auto gpu = std::make_shared<GatedGpu>(*std::move(host));
  auto range = Range::reserve(gpu, geometry);
  REQUIRE(static_cast<bool>(range));
  const std::array<PageIndex, 4> pages{0, 1, 2, 3};
  CHECK(static_cast<bool>((*range)->map(pages)));
  mine->arrived(4, kPage);
  shown.used_pages += 4;
  CHECK(shown.show(*neighbour) == Sight::kExact && has_others(ledger, kOtherPages));
  (*range)->hold_grant_of(std::exchange(mine, nullptr));
  gpu->after_unmap = [&] {
    shown.used_pages = kOtherPages;
    CHECK(shown.show(*neighbour) == Sight::kBounded && has_others(ledger, kOtherPages));
  };
  (*range).reset();
  CHECK(shown.show(*neighbour) == Sight::kExact && has_others(ledger, kOtherPages));
}

TEST(foreign_usage_is_not_hidden_by_dead_grants) {
  Ledger ledger;
  Gpu gpu;
  auto mine = ledger.join();
  REQUIRE(mine != nullptr);
  (void)ledger.one_that_died(a_dead_one(), 30);
  gpu.used_pages = 20;
  CHECK(gpu.show(*mine) == Sight::kExact && has_others(ledger, 20));
}

}  // namespace kvelastic
