// What the files of the ledger share: the words of a slot, read and judged. For them only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/life_lock.h"
#include "base/status.h"
#include "ledger/device_account.h"
#include "ledger/ledger.h"
#include "ledger/reclaim.h"

namespace kvelastic {

constexpr unsigned kGrantedShift = 32;
constexpr std::uint64_t kClaimMask = (std::uint64_t{1} << kGrantedShift) - 1;
/// Looks at another one's claim before it counts as a grant: its owner was stopped in between.
constexpr int kClaimLooks = 2000;
/// Looks without giving the processor away; a claim stands for a few hundred nanoseconds.
constexpr int kClaimSpins = 200;

constexpr std::uint64_t granted_of(std::uint64_t units) {
  return units >> kGrantedShift;
}
constexpr std::uint64_t claimed_of(std::uint64_t units) {
  return units & kClaimMask;
}
/// Of LedgerSlot::moves: how much of the grant is on its way.
constexpr std::uint64_t moving_of(std::uint64_t moves) {
  return moves & kClaimMask;
}
constexpr bool is_alive(std::uint64_t life) {
  return (life & 1) != 0;
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
  return less(slot.wanted_bytes[depth].load(), slot.handled_bytes[depth].load());
}

/// kSegmentFormat, as LedgerView::open.
Status validate_ledger(std::span<const std::byte> bytes);
/// All that is asked of a member and not dealt with.
std::uint64_t open_requests(const LedgerSlot& slot);
/// What the ledger says of one member; times become ages.
Contender contender_of(const LedgerSlot& slot, std::uint64_t now_ns, const ReclaimRules& rules);
/// Frees the slots of the dead, and wakes those who wait for memory; answers how many.
std::uint64_t reap_dead(LedgerLayout& layout, const LifeJudge& judge);
/// Wakes everybody but `except` who asks for memory, or waits for what it wants to reserve.
void wake_who_waits(LedgerLayout& layout, std::size_t except);

}  // namespace kvelastic
