#include "pool/pool_state.h"

#include <algorithm>
#include <utility>

namespace kvelastic {
namespace {

using Reach = Accounting::Reach;

/// The size of a page on all devices.
std::uint64_t bytes_of_page(const DeviceSet* device_set, const Geometry& geometry) {
  return device_set != nullptr ? device_set->page_bytes() : geometry.page_bytes();
}

PageLimit start_limit(const PoolOptions& options, const Geometry& geometry,
                      const DeviceSet* device_set) {
  return {options.limit_bytes,
          device_set != nullptr ? device_set->capacity_bytes() : options.capacity_bytes,
          bytes_of_page(device_set, geometry), geometry.pages};
}

}  // namespace

bool is_final(const Error& error) {
  return error.code == Errc::kPoolFailed || error.code == Errc::kChannelClosed ||
         error.code == Errc::kChannelTimeout;
}

PoolState::PoolState(const PoolOptions& with, std::shared_ptr<Backing> memory,
                     std::unique_ptr<Blocks> blocks, std::shared_ptr<DeviceSet> shared)
    : options(with),
      backing(std::move(memory)),
      device_set(std::move(shared)),
      geometry(blocks->geometry()),
      state_(options, std::move(blocks), device_set, geometry) {
  const Change first(*this);
}

std::uint64_t PoolState::first_batch_pages() const {
  return std::clamp<std::uint64_t>(kFirstBatchBytes / page_bytes(), 1, largest_batch_pages());
}

std::uint64_t PoolState::largest_batch_pages() const {
  const auto pages_of = [this](std::uint64_t bytes) {
    return std::max<std::uint64_t>(bytes / page_bytes(), 1);
  };
  if (!backing->works_behind()) return pages_of(kLargestBatchBytes);
  return std::min(pages_of(kLargestGpuBatchBytes),
                  std::max<std::uint64_t>(kMostGpuBatchHandles / geometry.extents_per_page, 1));
}

void PoolState::note_refused(State& state) const {
  state.refusals.is_pending = true;
  state.refusals.in_a_row = std::min(state.refusals.in_a_row + 1, kMostRefusals);
  if (device_set && backing->works_behind()) state.moved_bytes = kLargeMoveBytes;
}

// --- publication -------------------------------------------------------------------------------

void PoolState::publish() {
  const Accounting& accounting = state_.accounting;
  const Blocks& blocks = accounting.blocks();
  const std::uint64_t within_limit = accounting.count_available(Reach::kLimit);
  const std::uint64_t mapped = accounting.count_available(Reach::kMapped);
  const std::uint64_t over_pages = accounting.over_pages();
  const bool more = within_limit > available_limit_.load(std::memory_order_relaxed) ||
                    mapped > available_mapped_.load(std::memory_order_relaxed);
  available_limit_.store(within_limit, std::memory_order_relaxed);
  available_mapped_.store(mapped, std::memory_order_relaxed);
  reusable_.store(accounting.reusable_blocks(), std::memory_order_relaxed);
  const bool given_back = std::exchange(state_.given_back, false);
  if (std::exchange(state_.more_available, false) || more) {
    state_.epoch.note();
    if (given_back) given_back_epoch_.fetch_add(1, std::memory_order_relaxed);
  }
  const std::uint64_t coming = accounting.moving_pages() * geometry.blocks_per_page;
  const auto null_block = static_cast<std::int64_t>(blocks.occupancy(0) ? 0 : 1);
  available_held_.store(static_cast<std::int64_t>(mapped + coming) - null_block,
                        std::memory_order_relaxed);
  over_limit_.store(over_pages > 0, std::memory_order_relaxed);
  state_.provisioning.see_parked(blocks.parked_pages());
  ControlBlockOwner* const control_block = state_.counters.control_block();
  if (control_block != nullptr || device_set) {
    const Usage now = state_.usage(within_limit);
    if (control_block != nullptr) control_block->publish_usage(now);
    if (device_set) publish_to_ledgers(now);
  }
  if (state_.work.has_thread()) call_maintenance(over_pages);
}

void PoolState::publish_to_ledgers(const Usage& usage) {
  const bool active = std::exchange(published_activity_, activity()) != activity();
  // Memory that others can reclaim: a page with a block in use stays, even if its other blocks are
  // cached. Reserved blocks are contiguous, as one alloc returned them, and are released like
  // cached ones.
  const std::uint64_t pages = state_.accounting.blocks().evictable_pages() +
                              state_.accounting.reserved_blocks() / geometry.blocks_per_page;
  device_set->publish(usage.in_use_bytes, pages * usage.page_bytes, usage.parked_bytes, active);
}

void PoolState::call_maintenance(std::uint64_t over_pages) {
  const Accounting& accounting = state_.accounting;
  DueWork work;
  work.enforce = accounting.can_give();
  work.provision = state_.provisioning.is_due(accounting.blocks().parked_pages()) &&
                   accounting.mappable_pages() > 0 && accounting.held_pages() > 0;
  work.decay = !state_.work.is_decay_armed() && state_.has_something_to_decay();
  work.watch = state_.depends_on_free_memory();
  work.cache_idle = state_.has_cached_to_age();
  work.pursue = state_.memory_wait.pages() > 0;
  work.look = state_.moved_bytes >= kLargeMoveBytes;
  work.failed = accounting.failure().has_value();
  work.over_pages = over_pages;
  state_.work.see(work);
}

std::uint64_t PoolState::available() const {
  const std::uint64_t within_limit = available_limit_.load(std::memory_order_relaxed);
  if (!device_set || within_limit == 0) return within_limit;
  const std::int64_t held = available_held_.load(std::memory_order_relaxed);
  const auto with = [&](std::uint64_t pages) {
    // No device has that many pages; the limit is the smaller bound then.
    const auto more =
        static_cast<std::int64_t>(std::min(pages, geometry.pages) * geometry.blocks_per_page);
    return std::min(within_limit,
                    static_cast<std::uint64_t>(std::max<std::int64_t>(held + more, 0)));
  };
  const std::uint64_t free_now = with(device_set->room());
  if (free_now == within_limit) return within_limit;
  return with(device_set->reach());
}

// --- the state ---------------------------------------------------------------------------------

State::State(const PoolOptions& with, std::unique_ptr<Blocks> blocks,
             std::shared_ptr<DeviceSet> shared, const Geometry& geometry)
    : options(with),
      device_set(std::move(shared)),
      accounting(std::move(blocks), start_limit(options, geometry, device_set.get()),
                 bytes_of_page(device_set.get(), geometry), options.max_blocks, counters),
      provisioning(pages_ahead(options.min_reserved_pages, geometry.page_bytes()),
                   pages_ahead(options.max_reserved_pages, geometry.page_bytes()),
                   options.preallocate) {}

void State::set_now() {
  using std::chrono::milliseconds;
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  accounting.blocks().set_now(
      static_cast<std::uint32_t>(std::chrono::duration_cast<milliseconds>(since).count()));
}

void State::fail_if_final(const Status& status) {
  if (status || accounting.failure() || !is_final(status.error())) return;
  Error error = status.error();
  // Only this call waited for the timeout; later calls fail at once.
  if (error.code == Errc::kChannelTimeout) error.code = Errc::kChannelClosed;
  accounting.fail(std::move(error));
  more_available = true;  // threads that wait for blocks get the error from their next alloc
}

Usage State::usage(std::uint64_t available) const {
  const Blocks& blocks = accounting.blocks();
  const std::uint64_t page_bytes = accounting.page_bytes();
  const std::uint64_t block_share_bytes = page_bytes / accounting.geometry().blocks_per_page;
  Usage usage;
  usage.capacity_bytes = capacity_bytes();
  usage.mapped_bytes = accounting.held_pages() * page_bytes;
  usage.in_use_bytes = blocks.used_blocks() * block_share_bytes;
  usage.cached_bytes = blocks.cached_blocks() * block_share_bytes;
  usage.parked_bytes = blocks.parked_pages() * page_bytes;
  usage.page_bytes = page_bytes;
  usage.blocks_total = accounting.max_blocks();
  usage.blocks_in_use = accounting.in_use();
  usage.blocks_cached = blocks.cached_blocks();
  usage.blocks_available = available;
  usage.blocks_reserved = accounting.reserved_blocks();
  usage.pages_mapped = accounting.held_pages();
  usage.pages_parked = blocks.parked_pages();
  usage.asleep = accounting.limit.is_asleep() ? 1 : 0;
  usage.limit_bytes = accounting.limit.requested_bytes();
  usage.under_pressure = accounting.limit.is_under_pressure() ? 1 : 0;
  usage.mappings_per_page = page_bytes / accounting.geometry().extent_bytes;
  if (waiting) {
    const WaitingBytes bytes = waiting_bytes();
    usage.reports_waiting = 1;
    usage.requests_waiting = waiting->requests;
    usage.first_needs_bytes = bytes.first_needs;
    usage.first_may_need_bytes = bytes.first_may_need;
  }
  return usage;
}

WaitingBytes State::waiting_bytes() const {
  const std::uint64_t page_bytes = accounting.page_bytes();
  // The null block also lies on one of the pages.
  const auto least_limit = [&](std::uint64_t count) {
    return count == 0 ? 0 : accounting.pages_for(count + 1) * page_bytes;
  };
  const Waiting reported = waiting.value_or(Waiting{});
  return {least_limit(reported.first_blocks), least_limit(reported.first_may_blocks),
          accounting.limit.allowed_pages() * page_bytes};
}

LimitState State::limit_state() const {
  const std::uint64_t page_bytes = accounting.page_bytes();
  return {accounting.limit.requested_bytes(), accounting.limit.pages() * page_bytes,
          accounting.held_pages() * page_bytes, accounting.over_pages() * page_bytes};
}

PoolStats State::stats() const {
  const Blocks& blocks = accounting.blocks();
  PoolStats stats;
  stats.page_bytes = accounting.page_bytes();
  stats.pages_total = accounting.geometry().pages;
  stats.pages_limit = accounting.limit.pages();
  stats.pages_mapped = accounting.held_pages();
  stats.pages_parked = blocks.parked_pages();
  stats.blocks_total = accounting.max_blocks();
  stats.blocks_used = accounting.in_use() - blocks.waiting_blocks();
  stats.blocks_pinned = blocks.waiting_blocks();
  stats.blocks_cached = blocks.cached_blocks();
  stats.blocks_reserved = accounting.reserved_blocks();
  stats.blocks_available = accounting.count_available(Reach::kLimit);
  stats.allocs = counters[Counter::kAllocs];
  stats.frees = counters[Counter::kFrees];
  stats.alloc_failures = counters[Counter::kAllocFailures];
  stats.blocks_evicted = counters[Counter::kBlocksEvicted];
  stats.blocks_moved = counters[Counter::kBlocksMoved];
  stats.blocks_clean = blocks.clean_blocks();
  stats.blocks_under_writeback = blocks.writeback_blocks();
  stats.blocks_demoted = counters[Counter::kBlocksDemoted];
  stats.blocks_dropped = counters[Counter::kBlocksDropped];
  stats.pages_mapped_ever = counters[Counter::kPagesMapped];
  stats.pages_unmapped_ever = counters[Counter::kPagesUnmapped];
  stats.provision_runs = counters[Counter::kProvisionRuns];
  return stats;
}

}  // namespace kvelastic
