// Accessors for the words of a slot, shared by the ledger's source files only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/liveness_lock.h"
#include "base/status.h"
#include "ledger/device_account.h"
#include "ledger/ledger.h"
#include "ledger/reclaim.h"

namespace kvelastic {

constexpr unsigned kGrantedShift = 32;
constexpr std::uint64_t kClaimMask = (std::uint64_t{1} << kGrantedShift) - 1;
/// Checks of another member's claim before it counts as a grant: its owner is stopped.
constexpr int kClaimLooks = 2000;
/// Checks before yielding the processor; a claim stands for a few hundred nanoseconds.
constexpr int kClaimSpins = 200;

constexpr std::uint64_t granted_of(std::uint64_t units) {
  return units >> kGrantedShift;
}
constexpr std::uint64_t claimed_of(std::uint64_t units) {
  return units & kClaimMask;
}
/// The part of the grant in transit, from LedgerSlot::moves.
constexpr std::uint64_t moving_of(std::uint64_t moves) {
  return moves & kClaimMask;
}
constexpr bool is_alive(std::uint64_t incarnation) {
  return (incarnation & 1) != 0;
}
constexpr std::uint64_t units_of(std::uint64_t bytes) {
  return (bytes + kGrantUnitBytes - 1) / kGrantUnitBytes;
}

inline std::size_t slots_used(const LedgerLayout& layout) {
  return std::min<std::size_t>(layout.slots_used.load(), kLedgerSlots);
}

inline DeviceMemorySize size_of(const LedgerLayout& layout) {
  return {layout.capacity_bytes.load(), layout.total_bytes.load()};
}

inline std::uint64_t open_at(const LedgerSlot& slot, std::size_t depth) {
  return saturating_sub(slot.reclaim_bytes[depth].load(), slot.handled_bytes[depth].load());
}

/// Fails with kSegmentFormat, as LedgerView::open.
Status validate_ledger(std::span<const std::byte> bytes);
/// The open reclaim requests to a member, in bytes.
std::uint64_t open_requests(const LedgerSlot& slot);
/// Converts a slot to a contender; times become ages.
Contender contender_of(const LedgerSlot& slot, std::uint64_t now_ns, const ReclaimRules& rules);
/// Frees the slots of dead members, wakes members that wait for memory, and returns the number
/// freed.
std::uint64_t reap_dead(LedgerLayout& layout, const LivenessCheck& check);
/// Wakes all members but `except` that request memory or wait for a reserve.
void wake_who_waits(LedgerLayout& layout, std::size_t except);

}  // namespace kvelastic
