#include "pool/limits.h"

#include <algorithm>

namespace kvelastic {

void Limits::report_limit(const State& state) {
  if (!pool_.device_set) return;
  pool_.device_set->set_limit(
      std::min(state.accounting.limit.requested_bytes(), state.capacity_bytes()));
}

LimitState Limits::set(std::uint64_t limit_bytes) {
  const PoolState::Change change(pool_, PoolState::InSession{});
  change->accounting.limit.request(limit_bytes, change->capacity_bytes());
  change->accounting.close_pages_over_limit();
  report_limit(*change);
  return change->limit_state();
}

bool Limits::see_capacity() {
  {
    const PoolState::Look state(pool_);
    if (state->accounting.limit.has_seen(state->capacity_bytes())) return false;
  }
  const PoolState::Change change(pool_, PoolState::InSession{});
  change->accounting.limit.see_capacity(change->capacity_bytes());
  change->accounting.close_pages_over_limit();
  report_limit(*change);
  change->more_available =
      true;  // with more capacity, other instances may be able to release memory
  return true;
}

bool Limits::expire_pressure() {
  const PoolState::Change change(pool_);
  Accounting& accounting = change->accounting;
  Pressure& pressure = accounting.limit.pressure;
  if (!pressure.is_in_force()) return false;
  if (!pressure.expire(accounting.over_pages() > 0, Pressure::Time::clock::now())) return true;
  accounting.close_pages_over_limit();
  return false;
}

void Limits::set_asleep(bool asleep) {
  const PoolState::Change change(pool_, PoolState::InSession{});
  if (asleep && pool_.device_set) pool_.device_set->fall_asleep();
  change->accounting.limit.set_asleep(asleep ||
                                      (pool_.device_set && pool_.device_set->is_asleep()));
  change->accounting.close_pages_over_limit();
}

Status Limits::wake(std::chrono::nanoseconds timeout) {
  if (pool_.device_set) {
    const Result<DeviceSet::Claimed> claimed = pool_.device_set->claim_wake();
    if (!claimed) return claimed.error();
    if (Status there = pool_.device_set->wait_for_claim(*claimed, timeout); !there) return there;
  }
  set_asleep(false);
  return ok();
}

Result<LimitState> Limits::enforce(const std::function<bool()>& interrupted) {
  reclaimer_.write_back_for_limit(interrupted);
  return enforce_now();
}

Result<LimitState> Limits::enforce_now() {
  PoolState::Change change(pool_, PoolState::InSession{});
  if (Status done = reclaimer_.enforce(change); !done) return done.error();
  return change->limit_state();
}

Result<LimitState> Limits::settle() {
  reclaimer_.write_back_for_limit({});
  while (true) {
    Result<LimitState> state = enforce_now();
    if (!state || state->over_bytes == 0) return state;
    PoolState::Change change(pool_);
    if (!change->accounting.is_unmapping()) return state;
    pool_.settled.wait(change.for_wait(), [&] { return !change->accounting.is_unmapping(); });
  }
}

Limits::Excess Limits::excess() const {
  const PoolState::Look state(pool_);
  return {state->accounting.excess_pages(), state->accounting.blocks().used_by_page()};
}

}  // namespace kvelastic
