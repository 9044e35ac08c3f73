#include "pool/figures.h"

#include <algorithm>
#include <utility>

namespace kvelastic {

using Reach = Accounting::Reach;

void Figures::update() {
  const Blocks& blocks = accounting_.blocks();
  const std::uint64_t within_limit = accounting_.count_available(Reach::kLimit);
  const std::uint64_t mapped = accounting_.count_available(Reach::kMapped);
  const std::uint64_t over_pages = accounting_.over_pages();
  const bool more = within_limit > available_limit_.load(std::memory_order_relaxed) ||
                    mapped > available_mapped_.load(std::memory_order_relaxed);
  available_limit_.store(within_limit, std::memory_order_relaxed);
  available_mapped_.store(mapped, std::memory_order_relaxed);
  reusable_.store(accounting_.reusable_blocks(), std::memory_order_relaxed);
  if (more) arrivals.note();
  const std::uint64_t coming = accounting_.moving_pages() * accounting_.geometry().blocks_per_page;
  const auto null_block = static_cast<std::int64_t>(blocks.occupancy(0) ? 0 : 1);
  available_held_.store(static_cast<std::int64_t>(mapped + coming) - null_block,
                        std::memory_order_relaxed);
  over_limit_.store(over_pages > 0, std::memory_order_relaxed);
  provisioning_.see_parked(blocks.parked_pages());
  if (counters_.record() || places_) {
    const Usage now = usage(within_limit);
    if (counters_.record()) counters_.record()->publish_usage(now);
    if (places_) tell_ledgers(now);
  }
  if (!calls_.has_keeper()) return;
  KeeperWork work;
  work.enforce = accounting_.can_give();
  work.provision = provisioning_.is_due(blocks.parked_pages()) &&
                   accounting_.mappable_pages() > 0 && accounting_.held_pages() > 0;
  work.decay = !calls_.is_decay_armed() && has_something_to_decay();
  work.watch = has_page_to_watch();
  work.cache_idle = has_cached_to_age();
  work.pursue = starvation_.pages() > 0;
  work.look = moved_bytes_ >= kLargeMoveBytes;
  work.failed = accounting_.failure().has_value();
  work.over_pages = over_pages;
  calls_.see(work);
}

bool Figures::take_large_move() {
  if (moved_bytes_ < kLargeMoveBytes) return false;
  moved_bytes_ = 0;
  calls_.end_look();
  return true;
}

void Figures::tell_ledgers(const Usage& usage) {
  const bool active = std::exchange(told_activity_, activity()) != activity();
  // Memory that others can reclaim: a page with a block in use stays, even if its other blocks are
  // cached. Reserved blocks are contiguous, as one alloc returned them, and are released like
  // cached ones.
  const std::uint64_t pages =
      accounting_.blocks().evictable_pages() +
      accounting_.reserved_blocks() / accounting_.geometry().blocks_per_page;
  places_->publish(usage.in_use_bytes, pages * usage.page_bytes, usage.parked_bytes, active);
}

std::uint64_t Figures::available() const {
  const std::uint64_t within_limit = available_limit_.load(std::memory_order_relaxed);
  if (!places_ || within_limit == 0) return within_limit;
  const std::int64_t held = available_held_.load(std::memory_order_relaxed);
  const Geometry& geometry = accounting_.geometry();
  const auto with = [&](std::uint64_t pages) {
    // No device has that many pages; the limit is the smaller bound then.
    const auto more =
        static_cast<std::int64_t>(std::min(pages, geometry.pages) * geometry.blocks_per_page);
    return std::min(within_limit,
                    static_cast<std::uint64_t>(std::max<std::int64_t>(held + more, 0)));
  };
  const std::uint64_t free_now = with(places_->room());
  if (free_now == within_limit) return within_limit;
  return with(places_->reach());
}

Usage Figures::usage(std::uint64_t available) const {
  const Blocks& blocks = accounting_.blocks();
  const std::uint64_t page_bytes = accounting_.page_bytes();
  const std::uint64_t block_share_bytes = page_bytes / accounting_.geometry().blocks_per_page;
  Usage usage;
  usage.capacity_bytes = capacity_bytes();
  usage.mapped_bytes = accounting_.held_pages() * page_bytes;
  usage.in_use_bytes = blocks.used_blocks() * block_share_bytes;
  usage.cached_bytes = blocks.cached_blocks() * block_share_bytes;
  usage.parked_bytes = blocks.parked_pages() * page_bytes;
  usage.page_bytes = page_bytes;
  usage.blocks_total = accounting_.max_blocks();
  usage.blocks_in_use = accounting_.in_use();
  usage.blocks_cached = blocks.cached_blocks();
  usage.blocks_available = available;
  usage.blocks_reserved = accounting_.reserved_blocks();
  usage.pages_mapped = accounting_.held_pages();
  usage.pages_parked = blocks.parked_pages();
  usage.asleep = accounting_.limit.is_asleep() ? 1 : 0;
  usage.limit_bytes = accounting_.limit.requested_bytes();
  usage.squeezed = accounting_.limit.is_squeezed() ? 1 : 0;
  usage.mappings_per_page = page_bytes / accounting_.geometry().extent_bytes;
  if (waiting_) {
    const WaitingBytes bytes = waiting_bytes();
    usage.reports_waiting = 1;
    usage.requests_waiting = waiting_->requests;
    usage.first_needs_bytes = bytes.first_needs;
    usage.first_may_need_bytes = bytes.first_may_need;
  }
  return usage;
}

WaitingBytes Figures::waiting_bytes() const {
  const std::uint64_t page_bytes = accounting_.page_bytes();
  // The null block also lies on one of the pages.
  const auto least_limit = [&](std::uint64_t count) {
    return count == 0 ? 0 : accounting_.pages_for(count + 1) * page_bytes;
  };
  const Waiting waiting = waiting_.value_or(Waiting{});
  return {least_limit(waiting.first_blocks), least_limit(waiting.first_may_blocks),
          accounting_.limit.allowed_pages() * page_bytes};
}

LimitState Figures::limit_state() const {
  const std::uint64_t page_bytes = accounting_.page_bytes();
  return {accounting_.limit.requested_bytes(), accounting_.limit.pages() * page_bytes,
          accounting_.held_pages() * page_bytes, accounting_.over_pages() * page_bytes};
}

PoolStats Figures::stats() const {
  const Blocks& blocks = accounting_.blocks();
  PoolStats stats;
  stats.page_bytes = accounting_.page_bytes();
  stats.pages_total = accounting_.geometry().pages;
  stats.pages_limit = accounting_.limit.pages();
  stats.pages_mapped = accounting_.held_pages();
  stats.pages_parked = blocks.parked_pages();
  stats.blocks_total = accounting_.max_blocks();
  stats.blocks_used = accounting_.in_use() - blocks.waiting_blocks();
  stats.blocks_pinned = blocks.waiting_blocks();
  stats.blocks_cached = blocks.cached_blocks();
  stats.blocks_reserved = accounting_.reserved_blocks();
  stats.blocks_available = accounting_.count_available(Reach::kLimit);
  stats.allocs = counters_[Counter::kAllocs];
  stats.frees = counters_[Counter::kFrees];
  stats.alloc_failures = counters_[Counter::kAllocFailures];
  stats.blocks_evicted = counters_[Counter::kBlocksEvicted];
  stats.blocks_moved = counters_[Counter::kBlocksMoved];
  stats.blocks_clean = blocks.clean_blocks();
  stats.blocks_leaving = blocks.leaving_blocks();
  stats.blocks_demoted = counters_[Counter::kBlocksDemoted];
  stats.blocks_dropped = counters_[Counter::kBlocksDropped];
  stats.pages_mapped_ever = counters_[Counter::kPagesMapped];
  stats.pages_unmapped_ever = counters_[Counter::kPagesUnmapped];
  stats.provision_runs = counters_[Counter::kProvisionRuns];
  return stats;
}

}  // namespace kvelastic
