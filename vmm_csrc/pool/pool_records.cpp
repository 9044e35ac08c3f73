// The pool's interface for tiers: keys, copies, demotions, and the contents of blocks.
#include <algorithm>
#include <string>

#include "pool/pool.h"

namespace kvelastic {
namespace {

/// How often a call that waits for copies checks for interruption and releases clean pages.
constexpr std::chrono::milliseconds kLookInterval{5};
/// A shorter wait is not worth waking the copying thread.
constexpr std::chrono::milliseconds kLeastWait{1};

}  // namespace

// --- keys and copies -----------------------------------------------------------------------------

void Pool::use_tiers(const DemotionWaits& waits) {
  const Lock lock(mutex_);
  demotions_.use(waits);
  accounting_.use_tiers();
}

Status Pool::name(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  const Lock lock(mutex_);
  if (Status handed_out = accounting_.refuse_reserved(ids); !handed_out) return handed_out;
  return accounting_.blocks().name(ids, keys);
}

std::uint64_t Pool::mark_clean(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  const Lock lock(mutex_);
  return accounting_.blocks().mark_clean(ids, keys);
}

std::uint64_t Pool::forget_copies() {
  const Lock lock(mutex_);
  return accounting_.blocks().forget_copies();
}

// --- leaving -------------------------------------------------------------------------------------

std::optional<Pool::Demotion> Pool::next_demotion(std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  const std::optional<Demotions::Want> want = demotions_.next(lock, timeout);
  if (!want) return std::nullopt;
  const auto left = std::max(want->until - Demotions::Clock::now(), std::chrono::nanoseconds(0));
  return Demotion{want->reason, accounting_.blocks().dirty_blocks(), left};
}

void Pool::stop_demotions() {
  const Lock lock(mutex_);
  demotions_.stop();
}

Leaving Pool::begin_leaving(std::uint64_t most) {
  const Lock lock(mutex_);
  Blocks& blocks = accounting_.blocks();
  if (accounting_.failure()) most = 0;
  Leaving leaving = blocks.begin_leaving(
      most, demotions_.is_awaited() ? Blocks::LeaveFirst::kOfOnePage : Blocks::LeaveFirst::kOldest);
  if (leaving.ids.empty() && demotions_.is_awaited()) {
    demotions_.found_nothing(blocks.leaving_blocks() > 0);
  }
  return leaving;
}

std::vector<std::uint8_t> Pool::still_leaving(std::uint32_t ticket) const {
  const Lock lock(mutex_);
  return accounting_.blocks().still_leaving(ticket);
}

Result<std::uint64_t> Pool::end_leaving(std::uint32_t ticket,
                                        std::span<const std::uint8_t> copied) {
  const Lock lock(mutex_);
  Blocks& blocks = accounting_.blocks();
  if (const std::uint64_t left = blocks.leaving_of(ticket); left != 0 && left != copied.size()) {
    return Error{Errc::kInvalidArgument, std::to_string(copied.size()) + " flags for " +
                                             std::to_string(left) + " blocks; give one for each"};
  }
  const std::uint64_t cleaned = blocks.end_leaving(ticket, copied);
  const bool any = std::any_of(copied.begin(), copied.end(), [](auto flag) { return flag != 0; });
  demotions_.progressed(any || copied.empty());
  evict_over_bound();
  figures_.update();  // pages under writeback may be released now
  return cleaned;
}

// --- a shrinking pool waits for copies ----------------------------------------------------------

/// True if `pages` pages cannot be released without losing blocks that have no copy.
bool Pool::would_drop(std::uint64_t pages) const {
  const Blocks& blocks = accounting_.blocks();
  return blocks.dirty_blocks() > 0 && blocks.parked_pages() + blocks.clean_pages() < pages;
}

void Pool::demote_for_limit(const std::function<bool()>& interrupted) {
  Lock lock(mutex_);
  // After this, pages still over the limit are released with the rest of the cache
  // (Ladder::enforce).
  if (!demotions_.is_attended() || !would_drop(accounting_.excess_pages())) return;
  const Demotions::Wanting wanting(
      demotions_, accounting_.limit.is_asleep() ? DemotionReason::kSleep : DemotionReason::kLimit);
  while (wanting.goes_on() && would_drop(accounting_.excess_pages()) &&
         !(interrupted && interrupted())) {
    wanting.wait(lock, kLookInterval);
    if (accounting_.blocks().clean_pages() + accounting_.blocks().parked_pages() == 0) continue;
    // The session is taken before the lock.
    lock.unlock();
    {
      const std::lock_guard session(session_);
      lock.lock();
      (void)ladder_.give_clean(lock);  // a failure recurs in enforce_now()
      figures_.update();
      lock.unlock();
    }
    lock.lock();
  }
}

std::uint64_t Pool::clean(std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  const Blocks& blocks = accounting_.blocks();
  if (!demotions_.is_attended() || blocks.dirty_blocks() == 0) return blocks.dirty_blocks();
  const Demotions::Wanting wanting(demotions_, DemotionReason::kSleep, timeout);
  while (wanting.goes_on() && blocks.dirty_blocks() > 0) wanting.wait(lock, kLookInterval);
  return blocks.dirty_blocks();
}

void Pool::demote_for_others(std::uint64_t pages) {
  Lock lock(mutex_);
  if (!demotions_.is_attended() || !would_drop(pages)) return;
  const Demotions::Clock::time_point begun = Demotions::Clock::now();
  const std::chrono::nanoseconds wait = demotions_.reclaim_wait(begun);
  if (wait < kLeastWait) return;  // too short for a copy
  const Demotions::Wanting wanting(demotions_, DemotionReason::kReclaim, wait);
  while (wanting.goes_on() && would_drop(pages)) wanting.wait(lock, kLookInterval);
  demotions_.note_reclaim(Demotions::Clock::now() - begun);
}

// --- contents of blocks -------------------------------------------------------------------------

Status Pool::copy_records(std::span<const BlockSlot> blocks,
                          const std::shared_ptr<Staging>& staging, CopyTo to) {
  if (staging->record_bytes() != record_bytes()) {
    return Error{Errc::kInvalidArgument,
                 "the staging is for records of " + std::to_string(staging->record_bytes()) +
                     " bytes, and a block has " + std::to_string(record_bytes())};
  }
  if (Status mine = staging->made_by().refuse_in_a_child(); !mine) return mine;
  for (const BlockSlot& block : blocks) {
    if (block.slot >= staging->slots()) {
      return Error{Errc::kInvalidArgument, "slot " + std::to_string(block.slot) +
                                               " is not one of the staging's " +
                                               std::to_string(staging->slots())};
    }
  }
  if (to == CopyTo::kHost) return pages_.copy_records(blocks, staging, to);
  const auto note = [this](void (LoadsFirst::*happens)(LoadsFirst::Time)) {
    const Lock lock(mutex_);
    (loads_.*happens)(std::chrono::steady_clock::now());
  };
  note(&LoadsFirst::begin);
  Status copied = pages_.copy_records(blocks, staging, to);
  note(&LoadsFirst::end);
  return copied;
}

}  // namespace kvelastic
