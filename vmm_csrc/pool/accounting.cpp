#include "pool/accounting.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvelastic {

// --- pages -----------------------------------------------------------------------------------

bool Accounting::can_give() const {
  if (excess_pages() == 0 || failure_) return false;
  const bool null_page_only = limit.is_asleep() && held_pages_ == 1 && blocks_->null_page_is_bare();
  return blocks_->parked_pages() > 0 || blocks_->cached_blocks() > 0 || !reserved_.empty() ||
         null_page_only;
}

// --- blocks ----------------------------------------------------------------------------------

void Accounting::take(std::uint64_t count, std::vector<BlockId>& out) {
  out.reserve(count);
  while (out.size() < count && !reserved_.empty()) {
    out.push_back(reserved_.back());
    reserved_.pop_back();
  }
  blocks_->alloc(count - out.size(),
                 excess_pages() > 0 ? Blocks::Fit::kFullest : Blocks::Fit::kBest, out);
}

// --- pinned blocks -----------------------------------------------------------------------------

Result<PinTicket> Accounting::pin(std::span<const BlockId> ids, PinKind kind) {
  if (Status handed_out = refuse_reserved(ids); !handed_out) return handed_out.error();
  return blocks_->pin(ids, kind);
}

std::uint64_t Accounting::count_reusable() const {
  const std::uint64_t reusable = blocks_->reusable_blocks();
  if (excess_pages() == 0) return reusable;
  const std::uint64_t others = in_use() - blocks_->waiting_blocks();
  const std::uint64_t usable = usable_blocks();
  const std::uint64_t room = usable > others ? usable - others : 0;
  const std::uint64_t without = count_available(Reach::kMapped);
  return std::min(reusable, room > without ? room - without : 0);
}

void Accounting::reuse(std::uint64_t count, std::vector<BlockId>& out) {
  const std::size_t before = evicted_.size();
  blocks_->reuse(count, out, evicted_);
  note_evicted(before);
}

// --- blocks set aside for allocs to come -------------------------------------------------------

void Accounting::reserve(std::vector<BlockId> ids) {
  reserved_ = std::move(ids);
  std::sort(reserved_.begin(), reserved_.end());
}

bool Accounting::drop_reserved() {
  if (reserved_.empty()) return false;
  (void)blocks_->free(std::exchange(reserved_, {}));
  return true;
}

Status Accounting::refuse_reserved(std::span<const BlockId> ids) const {
  for (const BlockId id : reserved_.empty() ? std::span<const BlockId>{} : ids) {
    if (!std::binary_search(reserved_.begin(), reserved_.end(), id)) continue;
    return Error{Errc::kDoubleFree, "block " + std::to_string(id) +
                                        " is reserved and was never handed out; call "
                                        "free_reserved() to give reserved blocks back"};
  }
  return ok();
}

// --- evictions and moves -----------------------------------------------------------------------

void Accounting::note_evicted(std::size_t before, Loss loss) {
  const std::size_t count = evicted_.size() - before;
  if (count == 0) return;
  counters_.add(Counter::kBlocksEvicted, count);
  if (has_tiers_) {
    const auto demoted = static_cast<std::size_t>(
        std::count_if(evicted_.begin() + static_cast<std::ptrdiff_t>(before), evicted_.end(),
                      [](const EvictedBlock& block) { return block.has_copy; }));
    counters_.add(Counter::kBlocksDemoted, demoted);
    if (loss == Loss::kDropped) counters_.add(Counter::kBlocksDropped, count - demoted);
  }
  has_changes_.store(true, std::memory_order_release);
}

void Accounting::evict_oldest(std::uint64_t count) {
  const std::size_t before = evicted_.size();
  for (; count > 0; --count) (void)blocks_->evict_oldest_block(evicted_);
  note_evicted(before);
}

bool Accounting::evict_cheapest_page() {
  const std::size_t before = evicted_.size();
  const bool evicted = blocks_->evict_cheapest_page(evicted_);
  note_evicted(before);
  return evicted;
}

void Accounting::evict_all() {
  evict_oldest(blocks_->cached_blocks());
  const std::size_t before = evicted_.size();
  blocks_->evict_waiting(evicted_);
  note_evicted(before);
}

void Accounting::evict_down_to(std::uint64_t bound) {
  const std::size_t before = evicted_.size();
  while (blocks_->cached_blocks() > bound) {
    const std::optional<std::uint32_t> cost = blocks_->cheapest_page_cost();
    if (cost && *cost <= blocks_->cached_blocks() - bound) {
      (void)blocks_->evict_cheapest_page(evicted_);
    } else {
      (void)blocks_->evict_oldest_block(evicted_);
    }
  }
  note_evicted(before);
}

void Accounting::evict_not_copyable_down_to(std::uint64_t bound) {
  const std::uint64_t cached = blocks_->cached_blocks();
  evict_oldest(cached - std::min(cached, std::max(bound, blocks_->copyable_blocks())));
}

void Accounting::evict_idle(std::uint32_t idle_ms, std::uint32_t copyable_idle_ms) {
  const std::size_t before = evicted_.size();
  blocks_->evict_idle(idle_ms, copyable_idle_ms, evicted_);
  note_evicted(before);
}

void Accounting::note_evictions_as_changes() {
  for (const EvictedBlock& block : std::exchange(evicted_, {})) {
    changes_.push_back({block.id, block.has_copy ? BlockChange::kDemoted : BlockChange::kEvicted});
  }
}

std::uint64_t Accounting::finish_moves(std::span<const BlockMove> moves, bool copied) {
  // Earlier evictions precede these moves: a block may move to the id of an evicted one.
  note_evictions_as_changes();
  std::uint64_t moved = 0;
  for (const BlockMove& move : moves) {
    if (!blocks_->finish_move(move, copied)) continue;
    changes_.push_back({move.from, move.to});
    ++moved;
  }
  if (!changes_.empty()) has_changes_.store(true, std::memory_order_release);
  counters_.add(Counter::kBlocksMoved, moved);
  return moved;
}

void Accounting::discard_all() {
  reserved_.clear();
  const std::size_t before = evicted_.size();
  blocks_->clear(evicted_);
  note_evicted(before, Loss::kDiscarded);
}

void Accounting::drop_pins() {
  const std::size_t before = evicted_.size();
  blocks_->drop_pins(evicted_);
  note_evicted(before);
}

std::vector<BlockChange> Accounting::take_changes() {
  has_changes_.store(false, std::memory_order_release);
  note_evictions_as_changes();
  return std::exchange(changes_, {});
}

// --- final failure
// ----------------------------------------------------------------------------------

void Accounting::fail(Error error) {
  if (failure_) return;
  failure_ = std::move(error);
  has_failed_.store(true, std::memory_order_relaxed);
}

Status Accounting::check_integrity() const {
  if (Status sound = blocks_->check_integrity(); !sound) return sound;
  if (held_pages_ < blocks_->mapped_pages()) {
    return Error{Errc::kIntegrity, "the pool holds " + std::to_string(held_pages_) +
                                       " pages, of which " +
                                       std::to_string(blocks_->mapped_pages()) + " are mapped"};
  }
  if (unmapping_pages_ > moving_pages()) {
    return Error{Errc::kIntegrity, std::to_string(unmapping_pages_) +
                                       " pages are being unmapped, of " +
                                       std::to_string(moving_pages()) + " in transit"};
  }
  if (!reserved_.empty() && reserved_.front() == Blocks::kNullBlock) {
    return Error{Errc::kIntegrity, "the null block is reserved"};
  }
  if (has_changes() == (evicted_.empty() && changes_.empty())) {
    return Error{Errc::kIntegrity, "the mark of evicted blocks disagrees with their list"};
  }
  return ok();
}

}  // namespace kvelastic
