#include "pool/background_work.h"

#include <algorithm>

namespace kvelastic {
namespace {

struct IdleTimes {
  std::int64_t idle_ms, copyable_ms;
};

/// A copyable block may stay twice as long, so that a tier can copy it.
IdleTimes idle_times(const State& state) {
  const std::int64_t idle_ms = state.options.cache_idle.count();
  return {idle_ms, state.demotions.takes_blocks() ? 2 * idle_ms : idle_ms};
}

}  // namespace

void BackgroundWork::on_work(std::function<void()> wake) {
  const Change change(pool_);
  change->work.on_work(std::move(wake));
}

// --- memory of other instances -----------------------------------------------------------------

Result<std::uint64_t> BackgroundWork::give_up(std::uint64_t pages, Depth depth,
                                              std::uint64_t min_pages) {
  if (depth != Depth::kParked) reclaimer_.write_back_for_others(pages);
  Change change(pool_, PoolState::InSession{});
  return reclaimer_.give_up(change, pages, depth, min_pages);
}

bool BackgroundWork::pursue() {
  Change change(pool_);
  return grower_.pursue(change);
}

Sight BackgroundWork::see_devices() {
  return pool_.device_set->see_devices([this] { return pool_.backing->device_memory(); });
}

bool BackgroundWork::take_large_move() {
  const Change change(pool_);
  if (change->moved_bytes < kLargeMoveBytes) return false;
  change->moved_bytes = 0;
  change->work.end_look();
  return true;
}

bool BackgroundWork::arm_memory_watch() {
  const Change change(pool_);
  return change->work.arm_watch(change->depends_on_free_memory());
}

void BackgroundWork::note_memory() {
  const Change change(pool_);
  if (std::exchange(change->refusals.is_pending, false)) change->more_available = true;
}

// --- ahead of demand, and when idle --------------------------------------------------------------

Result<std::uint64_t> BackgroundWork::provision() {
  Change change(pool_);
  const Blocks& blocks = change->accounting.blocks();
  const auto loads_go_first = [&] {
    return change->loads.go_first(std::chrono::steady_clock::now());
  };
  if (loads_go_first() || !change->work.take_provision()) return std::uint64_t{0};
  const std::uint64_t pages = std::min(change->provisioning.take_due(blocks.parked_pages()),
                                       change->accounting.mappable_pages());
  if (pages == 0) return std::uint64_t{0};
  change->counters.add(Counter::kProvisionRuns);
  Result<std::uint64_t> mapped = grower_.map(change, pages, loads_go_first);
  // The publication wakes the maintenance thread again.
  if (mapped && *mapped < pages && loads_go_first()) {
    change->provisioning.put_back(pages - *mapped, blocks.parked_pages());
  }
  return mapped;
}

Result<std::uint64_t> BackgroundWork::trim(std::uint64_t most) {
  Change change(pool_, PoolState::InSession{});
  change->provisioning.cancel();
  return reclaimer_.unmap_parked(change, most);
}

Result<std::uint64_t> BackgroundWork::compact() {
  Change change(pool_, PoolState::InSession{});
  return reclaimer_.compact(change);
}

std::optional<std::chrono::milliseconds> BackgroundWork::evict_idle() {
  // Takes the session only to evict: an engine may hold it for a whole step.
  if (const auto left = until_idle_eviction(); !left || left->count() > 0) return left;
  {
    const Change change(pool_, PoolState::InSession{});
    const IdleTimes idle = idle_times(*change);
    change->accounting.evict_idle(static_cast<std::uint32_t>(idle.idle_ms),
                                  static_cast<std::uint32_t>(idle.copyable_ms));
  }
  return until_idle_eviction();
}

/// The time until a cached block exceeds its idle time; empty without such a block.
std::optional<std::chrono::milliseconds> BackgroundWork::until_idle_eviction() {
  const Change change(pool_);
  if (!change->work.arm_cache_idle(change->has_cached_to_age())) return std::nullopt;
  change->set_now();
  const Blocks& blocks = change->accounting.blocks();
  const IdleTimes idle = idle_times(*change);
  std::int64_t left_ms = idle.copyable_ms;
  if (const auto oldest_ms = blocks.oldest_not_copyable_ms())
    left_ms = std::min(left_ms, idle.idle_ms - *oldest_ms);
  if (const auto oldest_ms = blocks.oldest_copyable_ms())
    left_ms = std::min(left_ms, idle.copyable_ms - *oldest_ms);
  return std::chrono::milliseconds(std::max<std::int64_t>(left_ms, 0));
}

ParkedUse BackgroundWork::take_parked_use() {
  const Change change(pool_);
  return change->provisioning.take_use(change->accounting.blocks().parked_pages());
}

bool BackgroundWork::arm_decay() {
  const Change change(pool_);
  return change->work.arm_decay(change->has_something_to_decay());
}

}  // namespace kvelastic
