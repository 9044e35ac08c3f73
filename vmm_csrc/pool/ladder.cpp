#include "pool/ladder.h"

#include <algorithm>
#include <vector>

namespace kvelastic {

Status Ladder::enforce(Lock& lock) {
  const KeeperCalls::Enforcing enforcing(calls_);  // also ends on an exception
  if (accounting_.excess_pages() > accounting_.blocks().parked_pages()) before_moves(lock);
  return go_down(lock);
}

Status Ladder::go_down(Lock& lock) {
  const Blocks& blocks = accounting_.blocks();
  const bool asleep = accounting_.limit.is_asleep();
  if (asleep) accounting_.evict_all();  // a moved block would only be evicted later
  if (accounting_.excess_pages() > blocks.parked_pages()) (void)accounting_.drop_reserved();
  while (accounting_.excess_pages() > 0) {
    while (blocks.parked_pages() < accounting_.excess_pages() && empty_a_page(lock)) {
    }
    if (blocks.parked_pages() == 0) break;  // the remaining pages are in use
    Result<std::uint64_t> given = pages_.shrink(lock, accounting_.excess_pages());
    if (!given) return given.error();
  }
  // Each unmapped page leaves one less to drain.
  if (blocks.closed_pages() != accounting_.excess_pages()) accounting_.close_pages_over_limit();
  if (accounting_.excess_pages() == 0) return ok();
  // Cached blocks now only lie on pages in use. Evict them, too: the blocks in use then fit into
  // the fullest pages, and the pages over the limit get no new blocks and drain.
  accounting_.evict_all();
  return accounting_.limit.is_asleep() ? pages_.unmap_null_page(lock) : ok();
}

Status Ladder::give_clean(Lock& lock) {
  const KeeperCalls::Enforcing enforcing(calls_);
  const Blocks& blocks = accounting_.blocks();
  while (accounting_.excess_pages() > 0) {
    while (blocks.parked_pages() < accounting_.excess_pages() && blocks.clean_pages() > 0) {
      (void)accounting_.evict_cheapest_page();
    }
    if (blocks.parked_pages() == 0) break;
    Result<std::uint64_t> given = pages_.shrink(lock, accounting_.excess_pages());
    if (!given) return given.error();
  }
  return ok();
}

/// Before decisions are made: the device may still use blocks that will be moved.
void Ladder::before_moves(Lock& lock) {
  if (movable_ && accounting_.blocks().can_compact()) pages_.drain_ahead(lock);
}

/// Parks one more page by moving its cached blocks, or else by evicting them.
bool Ladder::empty_a_page(Lock& lock) {
  Result<std::uint64_t> moved = move_a_page(lock);
  if (moved && *moved > 0) return true;
  return accounting_.evict_cheapest_page();
}

Result<std::uint64_t> Ladder::compact(Lock& lock) {
  before_moves(lock);
  return move_a_page(lock);
}

Result<std::uint64_t> Ladder::move_a_page(Lock& lock) {
  std::vector<BlockMove> moves;
  if (!movable_ || accounting_.failure() || !accounting_.blocks().take_compaction(moves)) {
    return std::uint64_t{0};
  }
  Status copied = pages_.copy(lock, moves);
  const std::uint64_t moved = accounting_.finish_moves(moves, static_cast<bool>(copied));
  figures_.update();
  if (!copied) return copied.error();
  return moved;
}

Result<std::uint64_t> Ladder::give_up(Lock& lock, std::uint64_t pages, Depth depth,
                                      std::uint64_t min_pages) {
  const Blocks& blocks = accounting_.blocks();
  Squeeze& squeeze = accounting_.limit.squeeze;
  if (depth != Depth::kParked && pages > blocks.parked_pages()) before_moves(lock);
  const std::uint64_t staying = accounting_.staying_pages();
  const std::uint64_t kept = std::max<std::uint64_t>(min_pages, 1);
  std::uint64_t target = std::max(staying > pages ? staying - pages : std::uint64_t{0}, kept);
  if (depth == Depth::kInUse) target = std::max(target, squeeze.floor(Squeeze::Time::clock::now()));
  const std::uint64_t before = pages_.unmapped_ever();
  // If kernels must be waited for, all pages wait together.
  const std::uint64_t most_at_once = pages_.works_behind() ? pages : pages_.batch_pages();
  // Pages may have been mapped in the meantime; do not release more than requested.
  std::uint64_t given = 0;
  const auto missing = [&] {
    const std::uint64_t now = accounting_.staying_pages();
    return now > target ? std::min(now - target, pages - std::min(given, pages)) : 0;
  };
  while (missing() > 0) {
    const std::uint64_t next = std::min(missing(), most_at_once);
    while (depth != Depth::kParked && blocks.parked_pages() < next &&
           (accounting_.drop_reserved() || empty_a_page(lock))) {
    }
    if (blocks.parked_pages() == 0) break;
    Result<std::uint64_t> shrunk = pages_.shrink(lock, next);
    if (!shrunk) return shrunk.error();
    given += *shrunk;
  }
  if (depth == Depth::kInUse && missing() > 0) {
    squeeze.begin(target, Squeeze::Time::clock::now());
    accounting_.close_pages_over_limit();
    if (Status enforced = enforce(lock); !enforced) return enforced.error();
  }
  figures_.update();
  return pages_.unmapped_ever() - before;
}

}  // namespace kvelastic
