#include "pool/writeback.h"

#include <algorithm>
#include <string>

namespace kvelastic {

// --- keys and copies -----------------------------------------------------------------------------

void Writeback::use_tiers(const DemotionWaits& waits) {
  const Change change(pool_);
  change->demotions.use(waits);
  change->accounting.use_tiers();
}

Status Writeback::name(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  const Change change(pool_);
  if (Status handed_out = change->accounting.refuse_reserved(ids); !handed_out) return handed_out;
  return change->accounting.blocks().name(ids, keys);
}

std::uint64_t Writeback::mark_clean(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  const Change change(pool_);
  return change->accounting.blocks().mark_clean(ids, keys);
}

std::uint64_t Writeback::forget_copies() {
  const Change change(pool_);
  return change->accounting.blocks().forget_copies();
}

std::chrono::milliseconds Writeback::oldest_copyable() {
  const Change change(pool_);
  change->set_now();
  return std::chrono::milliseconds(change->accounting.blocks().oldest_copyable_ms().value_or(0));
}

// --- writeback -----------------------------------------------------------------------------------

std::optional<Writeback::Demotion> Writeback::next_demotion(std::chrono::nanoseconds timeout) {
  Change change(pool_);
  const std::optional<Demotions::Want> want = change->demotions.next(change.for_wait(), timeout);
  if (!want) return std::nullopt;
  const auto left = std::max(want->until - Demotions::Clock::now(), std::chrono::nanoseconds(0));
  return Demotion{want->reason, change->accounting.blocks().dirty_blocks(), left};
}

std::uint64_t Writeback::clean(std::chrono::nanoseconds timeout) {
  Change change(pool_);
  const Blocks& blocks = change->accounting.blocks();
  if (!change->demotions.is_attended() || blocks.dirty_blocks() == 0) return blocks.dirty_blocks();
  const Demotions::Wanting wanting(change->demotions, DemotionReason::kSleep, timeout);
  while (wanting.goes_on() && blocks.dirty_blocks() > 0) wanting.wait(change.for_wait());
  return blocks.dirty_blocks();
}

void Writeback::stop_demotions() {
  const Change change(pool_);
  change->demotions.stop();
}

WritebackBatch Writeback::begin(std::uint64_t most) {
  const Change change(pool_);
  Blocks& blocks = change->accounting.blocks();
  const bool awaited = change->demotions.is_awaited();
  if (change->accounting.failure()) most = 0;
  WritebackBatch batch = blocks.begin_writeback(
      most, awaited ? Blocks::WriteFirst::kOfOnePage : Blocks::WriteFirst::kOldest);
  if (batch.ids.empty() && awaited) change->demotions.found_nothing(blocks.writeback_blocks() > 0);
  return batch;
}

std::vector<std::uint8_t> Writeback::still_unchanged(std::uint32_t ticket) const {
  const PoolState::Look state(pool_);
  return state->accounting.blocks().still_unchanged(ticket);
}

Result<std::uint64_t> Writeback::end(std::uint32_t ticket, std::span<const std::uint8_t> copied) {
  const Change change(pool_);
  Blocks& blocks = change->accounting.blocks();
  if (const std::uint64_t left = blocks.blocks_of_ticket(ticket);
      left != 0 && left != copied.size()) {
    return Error{Errc::kInvalidArgument, std::to_string(copied.size()) + " flags for " +
                                             std::to_string(left) + " blocks; give one for each"};
  }
  const std::uint64_t cleaned = blocks.end_writeback(ticket, copied);
  const bool any = std::any_of(copied.begin(), copied.end(), [](auto flag) { return flag != 0; });
  change->demotions.progressed(any || copied.empty());
  reclaimer_.evict_over_bound(*change);
  return cleaned;
}

// --- contents of blocks -------------------------------------------------------------------------

Status Writeback::copy_records(std::span<const BlockSlot> blocks,
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
  const auto note = [&](void (LoadsFirst::*happens)(LoadsFirst::Time)) {
    if (to == CopyTo::kHost) return;
    const Change change(pool_);
    (change->loads.*happens)(std::chrono::steady_clock::now());
  };
  note(&LoadsFirst::begin);
  Status copied = guarded([&] { return pool_.backing->copy_records(blocks, staging, to); });
  note(&LoadsFirst::end);
  return copied;
}

}  // namespace kvelastic
