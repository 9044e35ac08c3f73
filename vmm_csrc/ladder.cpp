#include "ladder.h"

#include <algorithm>
#include <vector>

namespace kvelastic {

Status Ladder::enforce(Lock& lock) {
  const KeeperCalls::Enforcing enforcing(calls_);  // ends by an exception, too
  return go_down(lock);
}

Status Ladder::go_down(Lock& lock) {
  const Blocks& blocks = accounting_.blocks();
  const bool asleep = accounting_.limit.is_asleep();
  if (asleep) accounting_.evict_all();  // what is moved first would only be evicted later
  if (accounting_.over_pages() > blocks.parked_pages()) (void)accounting_.drop_reserved();
  while (accounting_.over_pages() > 0) {
    while (blocks.parked_pages() < accounting_.over_pages() && empty_a_page(lock)) {
    }
    if (blocks.parked_pages() == 0) break;  // what is left is in use
    if (Status given = pages_.shrink(lock, accounting_.over_pages()); !given) return given;
  }
  // Each page given back leaves one less to drain.
  if (blocks.closed_pages() != accounting_.over_pages()) accounting_.close_pages_over_limit();
  if (accounting_.over_pages() == 0) return ok();
  // Cached blocks now only lie on pages in use. They make way, too: with none of them in between,
  // the blocks that may be used fit into the fullest pages, and those over the limit get no new
  // ones and drain.
  accounting_.evict_all();
  return accounting_.limit.is_asleep() ? pages_.unmap_null_page(lock) : ok();
}

/// Parks one more page: by moving what is cached on it, or else by evicting that.
bool Ladder::empty_a_page(Lock& lock) {
  Result<std::uint64_t> moved = compact(lock);
  if (moved && *moved > 0) return true;
  return accounting_.evict_cheapest_page();
}

Result<std::uint64_t> Ladder::compact(Lock& lock) {
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
  const std::uint64_t held = accounting_.held_pages();
  const std::uint64_t kept = std::max<std::uint64_t>(min_pages, 1);
  std::uint64_t target = std::max(held > pages ? held - pages : std::uint64_t{0}, kept);
  if (depth == Depth::kInUse) target = std::max(target, squeeze.floor(Squeeze::Time::clock::now()));
  const std::uint64_t before = pages_.unmapped_ever();
  while (accounting_.held_pages() > target) {
    const std::uint64_t next = std::min(accounting_.held_pages() - target, pages_.batch_pages());
    while (depth != Depth::kParked && blocks.parked_pages() < next &&
           (accounting_.drop_reserved() || empty_a_page(lock))) {
    }
    if (blocks.parked_pages() == 0) break;
    if (Status given = pages_.shrink(lock, next); !given) return given.error();
  }
  if (depth == Depth::kInUse && accounting_.held_pages() > target) {
    squeeze.begin(target, Squeeze::Time::clock::now());
    accounting_.close_pages_over_limit();
    if (Status given = enforce(lock); !given) return given.error();
  }
  figures_.update();
  return pages_.unmapped_ever() - before;
}

}  // namespace kvelastic
