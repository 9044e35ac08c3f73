// The pool's interface for operators and the maintenance thread: limits, sleep, memory requests of
// others, provisioning, statistics.
#include <algorithm>

#include "pool/pool.h"

namespace kvelastic {

// --- limits and sleep --------------------------------------------------------------------------

void Pool::tell_limit() {
  if (!places_) return;
  places_->set_limit(std::min(accounting_.limit.requested_bytes(), figures_.capacity_bytes()));
}

LimitState Pool::set_limit(std::uint64_t limit_bytes) {
  const std::lock_guard session(session_);
  const Lock lock(mutex_);
  accounting_.limit.request(limit_bytes, figures_.capacity_bytes());
  accounting_.close_pages_over_limit();
  tell_limit();
  figures_.update();
  return figures_.limit_state();
}

bool Pool::see_capacity() {
  {
    const Lock lock(mutex_);
    if (accounting_.limit.has_seen(figures_.capacity_bytes())) return false;
  }
  const std::lock_guard session(session_);
  const Lock lock(mutex_);
  accounting_.limit.see_capacity(figures_.capacity_bytes());
  accounting_.close_pages_over_limit();
  tell_limit();
  figures_.arrivals.note();  // with more capacity, other instances may be able to release memory
  figures_.update();
  return true;
}

void Pool::set_asleep(bool asleep) {
  const std::lock_guard session(session_);
  const Lock lock(mutex_);
  if (asleep && places_) places_->fall_asleep();
  accounting_.limit.set_asleep(asleep || (places_ && places_->is_asleep()));
  accounting_.close_pages_over_limit();
  figures_.update();
}

bool Pool::is_asleep() const {
  const Lock lock(mutex_);
  return accounting_.limit.is_asleep();
}

Result<LimitState> Pool::enforce_limit(const std::function<bool()>& interrupted) {
  demote_for_limit(interrupted);
  return enforce_now();
}

Result<LimitState> Pool::enforce_now() {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  Status done = ladder_.enforce(lock);
  figures_.update();
  if (!done) return done.error();
  return figures_.limit_state();
}

Result<LimitState> Pool::settle_limit() {
  demote_for_limit({});
  while (true) {
    Result<LimitState> state = enforce_now();
    if (!state || state->over_bytes == 0) return state;
    Lock lock(mutex_);
    if (!accounting_.is_leaving()) return state;
    pages_.wait_until_left(lock);
  }
}

// --- memory requests of other instances ---------------------------------------------------------

Result<std::uint64_t> Pool::give_up(std::uint64_t pages, Depth depth, std::uint64_t min_pages) {
  if (depth != Depth::kParked) demote_for_others(pages);
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  return ladder_.give_up(lock, pages, depth, min_pages);
}

bool Pool::expire_squeeze() {
  const Lock lock(mutex_);
  Squeeze& squeeze = accounting_.limit.squeeze;
  if (!squeeze.is_in_force()) return false;
  if (!squeeze.expire(accounting_.over_pages() > 0, Squeeze::Time::clock::now())) return true;
  accounting_.close_pages_over_limit();
  figures_.update();
  return false;
}

bool Pool::pursue() {
  Lock lock(mutex_);
  return supply_.pursue(lock);
}

Sight Pool::see_devices() {
  return places_ ? places_->see_devices([this] { return pages_.device_memory(); }) : Sight::kNone;
}

bool Pool::take_large_move() {
  const Lock lock(mutex_);
  return figures_.take_large_move();
}

void Pool::report_busy(bool busy) {
  if (places_) places_->report_busy(busy);
}

WaitingBytes Pool::report_waiting(const Waiting& waiting) {
  const Lock lock(mutex_);
  if (figures_.set_waiting(waiting)) figures_.update();
  return figures_.waiting_bytes();
}

// --- ahead of demand, and when idle --------------------------------------------------------------

Result<std::uint64_t> Pool::provision() {
  Lock lock(mutex_);
  const auto loads_go_first = [this] { return loads_.go_first(std::chrono::steady_clock::now()); };
  if (loads_go_first() || !calls_.take_provision()) return std::uint64_t{0};
  const Blocks& blocks = accounting_.blocks();
  const std::uint64_t pages =
      std::min(provisioning_.take_wanted(blocks.parked_pages()), accounting_.mappable_pages());
  if (pages == 0) return std::uint64_t{0};
  counters_.add(Counter::kProvisionRuns);
  Result<std::uint64_t> grown = pages_.grow(lock, pages, loads_go_first);
  if (grown && *grown < pages && loads_go_first()) {
    provisioning_.put_back(pages - *grown, blocks.parked_pages());
    figures_.update();  // wakes the maintenance thread again
  }
  return grown;
}

bool Pool::is_provision_due() const {
  const Lock lock(mutex_);
  return calls_.is_called_to_provision();
}

Result<std::uint64_t> Pool::compact() {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  return ladder_.compact(lock);
}

Result<std::uint64_t> Pool::trim(std::uint64_t most) {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  return pages_.shrink(lock, most);
}

ParkedUse Pool::take_parked_use() {
  const Lock lock(mutex_);
  return provisioning_.take_use(accounting_.blocks().parked_pages());
}

bool Pool::arm_decay() {
  const Lock lock(mutex_);
  return calls_.arm_decay(figures_.has_something_to_decay());
}

// --- where memory runs short ---------------------------------------------------------------------

bool Pool::arm_memory_watch() {
  const Lock lock(mutex_);
  return calls_.arm_watch(figures_.has_page_to_watch());
}

void Pool::note_memory() {
  const Lock lock(mutex_);
  if (pages_.take_refusal()) figures_.arrivals.note();
}

Refusals Pool::refusals() const {
  const Lock lock(mutex_);
  return pages_.refusals();
}

// --- statistics -------------------------------------------------------------------------------

std::vector<BlockId> Pool::pinned() const {
  const Lock lock(mutex_);
  return accounting_.blocks().waiting_ids();
}

std::optional<Error> Pool::failure() const {
  const Lock lock(mutex_);
  return accounting_.failure();
}

LimitState Pool::limit_state() const {
  const Lock lock(mutex_);
  return figures_.limit_state();
}

Pool::Excess Pool::excess() const {
  const Lock lock(mutex_);
  return {accounting_.excess_pages(), accounting_.blocks().used_by_page()};
}

Usage Pool::usage() const {
  const Lock lock(mutex_);
  return figures_.usage();
}

PoolStats Pool::stats() const {
  const Lock lock(mutex_);
  return figures_.stats();
}

std::uint64_t Pool::mapped_bytes() const {
  const Lock lock(mutex_);
  return accounting_.held_pages() * accounting_.page_bytes();
}

std::optional<std::uint32_t> Pool::occupancy(PageIndex page) const {
  const Lock lock(mutex_);
  return accounting_.blocks().occupancy(page);
}

void Pool::publish_to(std::shared_ptr<RecordOwner> record) {
  const Lock lock(mutex_);
  counters_.publish_to(std::move(record));
  figures_.update();
}

void Pool::on_wanted(std::function<void()> wake) {
  const Lock lock(mutex_);
  calls_.on_work(std::move(wake));
}

Status Pool::check_integrity() const {
  const Lock lock(mutex_);
  if (Status sound = accounting_.check_integrity(); !sound) return sound;
  if (!places_ || accounting_.failure()) return ok();
  return places_->check_integrity(accounting_.held_pages());
}

}  // namespace kvelastic
