// Sessions while other threads give blocks back over the limit: for the thread sanitizer, and for
// the promise that what a session saw stays its own.
#include <atomic>
#include <chrono>
#include <future>
#include <semaphore>
#include <thread>

#include "check.h"
#include "pool/pool.h"
#include "pool_fixture.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kPage = HostDriver::kGranularityBytes;
constexpr std::uint64_t kPages = 8;
constexpr std::uint64_t kBlocksPerPage = 4;

/// Pages that cost nothing and can fail.
class NoMemory final : public Backing {
 public:
  Status map(std::span<const PageIndex>) override { return answer(); }
  Status unmap(std::span<const PageIndex>) override { return answer(); }
  bool works_behind() const override { return false; }
  Status drain() override { return ok(); }
  Status copy(std::span<const BlockMove>) override { return answer(); }
  Status copy_records(std::span<const BlockSlot>, const std::shared_ptr<Staging>&,
                      CopyTo) override {
    return ok();
  }
  std::vector<std::optional<DeviceMemory>> device_memory() override { return {}; }
  std::atomic<int> fail_after{-1};  ///< calls until the backing fails for good; negative: never

 private:
  Status answer() {
    if (fail_after.load() < 0 || fail_after.fetch_sub(1) > 0) return ok();
    fail_after = 0;
    return Error{Errc::kChannelTimeout, "the worker is late"};
  }
};

/// Pages of a GPU, with kernels before them that end when the test says so.
class LateGpu final : public Backing {
 public:
  Status map(std::span<const PageIndex>) override { return ok(); }
  Status unmap(std::span<const PageIndex>) override { return ok(); }
  bool works_behind() const override { return true; }
  Status drain() override {
    waiting_.release();
    kernels_.acquire();
    return ok();
  }
  Status copy(std::span<const BlockMove>) override { return ok(); }
  Status copy_records(std::span<const BlockSlot>, const std::shared_ptr<Staging>&,
                      CopyTo) override {
    return ok();
  }
  std::vector<std::optional<DeviceMemory>> device_memory() override { return {}; }

  /// Returns when somebody waits for the kernels.
  void wait_for_a_wait() { waiting_.acquire(); }
  void end_kernels() { kernels_.release(100); }

 private:
  std::counting_semaphore<> waiting_{0}, kernels_{0};
};

Geometry geometry() {
  return one_buffer(kPages, kBlocksPerPage);
}

std::unique_ptr<Pool> make_pool(std::shared_ptr<Backing> backing, std::int64_t max_cached = -1) {
  PoolOptions options;
  options.max_blocks = kPages * kBlocksPerPage;
  options.limit_bytes = options.capacity_bytes = kPages * kPage;
  options.max_cached_blocks = max_cached;
  auto made = Pool::create(geometry(), std::move(backing), options);
  return made ? *std::move(made) : nullptr;
}

}  // namespace

TEST(session_keeps_the_blocks_it_saw) {
  auto pool = make_pool(std::make_shared<NoMemory>(), 12);
  REQUIRE(pool != nullptr);
  std::atomic<bool> stop{false};
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i) {
    others.emplace_back([&, i] {
      for (int round = 0; !stop; ++round) {
        auto ids = pool->allocator.alloc(1 + (round + i) % 7);
        if (!ids || !*ids) continue;
        CHECK(static_cast<bool>(round % 3 == 0 ? pool->allocator.cache(**ids)
                                               : pool->allocator.free(**ids)));
        if (round % 5 == 0) (void)pool->background.trim();
      }
    });
  }
  others.emplace_back([&] {
    for (std::uint64_t round = 0; !stop; ++round) {
      (void)pool->limits.set((1 + round % kPages) * kPage);
      (void)pool->limits.enforce();
    }
  });
  int kept = 0;
  for (int round = 0; round < 400; ++round) {
    auto mine = pool->allocator.alloc(3);
    if (!mine || !*mine) {
      std::this_thread::yield();
      continue;
    }
    pool->state.session.lock();
    CHECK(pool->state.session.is_mine());
    (void)pool->allocator.take_changes();
    CHECK(static_cast<bool>(
        pool->allocator.cache(**mine)));  // the session's own call: this may evict
    bool whole = true;
    for (const auto [id, to] : pool->allocator.take_changes()) {
      for (const BlockId own : **mine) whole = whole && own != id;
    }
    std::this_thread::yield();
    if (whole) {
      ++kept;
      CHECK(static_cast<bool>(pool->allocator.touch(**mine)));
      pool->state.session.unlock();
      CHECK(static_cast<bool>(pool->allocator.free(**mine)));
    } else {
      (void)pool->allocator.free(**mine);
      pool->state.session.unlock();
    }
  }
  stop = true;
  for (std::thread& other : others) other.join();
  CHECK(kept > 0);
  CHECK(!pool->state.session.is_mine());
  CHECK(static_cast<bool>(pool->check_integrity()));
}

TEST(pool_with_failed_backing_refuses_allocations) {
  for (int fail_after = 0; fail_after < 12; ++fail_after) {
    auto backing = std::make_shared<NoMemory>();
    auto pool = make_pool(backing);
    REQUIRE(pool != nullptr);
    backing->fail_after = fail_after;
    std::vector<BlockId> held;
    for (int round = 0; round < 20 && !pool->state.has_failed(); ++round) {
      auto ids = pool->allocator.alloc(5);
      if (ids && *ids) held.insert(held.end(), (**ids).begin(), (**ids).end());
      if (round % 3 == 2) {
        CHECK(static_cast<bool>(pool->allocator.free(held)));
        held.clear();
        (void)pool->background.trim();
      }
    }
    REQUIRE(pool->state.has_failed());
    CHECK(pool->state.available() == 0 && pool->state.available_mapped() == 0);
    auto none = pool->allocator.alloc(1);
    CHECK(!none && none.error().code == Errc::kChannelClosed);
    CHECK(pool->allocator.ensure(1).error().code == Errc::kChannelClosed);
    CHECK(pool->allocator.try_to_reserve(1).error().code == Errc::kChannelClosed);
    std::optional<std::vector<BlockId>> at_once;
    CHECK(!pool->allocator.try_alloc(1, at_once));
    CHECK(static_cast<bool>(pool->allocator.free(held)));
    CHECK(static_cast<bool>(pool->check_integrity()));
  }
}

TEST(sleep_waits_for_concurrent_unmaps) {
  auto backing = std::make_shared<LateGpu>();
  auto pool = make_pool(backing);
  REQUIRE(pool != nullptr);
  CHECK(static_cast<bool>(pool->allocator.ensure(kPages * kBlocksPerPage - 1)));
  std::thread maintenance([&] { (void)pool->background.trim(); });
  backing->wait_for_a_wait();
  pool->limits.set_asleep(true);
  auto asleep = std::async(std::launch::async, [&] { return pool->limits.settle(); });
  (void)asleep.wait_for(std::chrono::milliseconds(50));  // long enough to answer too early
  backing->end_kernels();
  Result<LimitState> state = asleep.get();
  maintenance.join();
  CHECK(state && state->mapped_bytes == 0);
  CHECK(static_cast<bool>(pool->check_integrity()));
}

TEST(each_unlock_publishes_the_state) {
  auto pool = make_pool(std::make_shared<NoMemory>());
  REQUIRE(pool != nullptr);
  PoolState& state = pool->state;
  CHECK(state.available() == kPages * kBlocksPerPage - 1);
  const std::uint32_t epoch = state.epoch();
  {
    PoolState::Change change(state);
    change->accounting.limit.request(2 * kPage, kPages * kPage);
    {
      const PoolState::Change::Unlocked unlocked(change);
      CHECK(state.available() == 2 * kBlocksPerPage - 1 && unlocked.epoch() == epoch);
    }
    change->accounting.limit.request(3 * kPage, kPages * kPage);
    CHECK(state.available() == 2 * kBlocksPerPage - 1);
  }
  CHECK(state.available() == 3 * kBlocksPerPage - 1 && state.epoch() == epoch + 1);
}

}  // namespace kvelastic
