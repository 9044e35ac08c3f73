// The parts of a pool that are pure state: their clock is a number here, and nothing is mapped.
#include <chrono>
#include <set>
#include <vector>

#include "base/pauses.h"
#include "check.h"
#include "pool/accounting.h"
#include "pool/memory_wait.h"
#include "pool/page_limit.h"
#include "pool/parked_decay.h"
#include "pool/pending_work.h"
#include "pool/pressure.h"
#include "pool/provisioning.h"
#include "pool_fixture.h"

namespace kvelastic {
namespace {

using std::chrono::milliseconds;
constexpr Pressure::Time kStart{};

constexpr std::uint64_t kPage = 2 << 20;
constexpr std::uint64_t kPages = 4;
constexpr std::uint64_t kBlocksPerPage = 8;

Geometry geometry() {
  return one_buffer(kPages, kBlocksPerPage);
}

/// An accounting of four pages, `mapped` of them there.
struct Books {
  Counters counters;
  Accounting accounting;

  explicit Books(std::uint64_t mapped)
      : accounting(*Blocks::create(geometry()), PageLimit(kPages * kPage, kPages * kPage, kPage, 4),
                   kPage, kPages * kBlocksPerPage, counters) {
    accounting.hold(mapped);
    for (std::uint64_t i = 0; i < mapped; ++i) {
      accounting.blocks().add_page(*accounting.blocks().take_unmapped());
    }
  }
  std::vector<BlockId> take(std::uint64_t count) {
    std::vector<BlockId> ids;
    accounting.take(count, ids);
    return ids;
  }
  bool sound() const { return static_cast<bool>(accounting.check_integrity()); }
};

/// A maintenance thread that counts its calls.
struct MaintenanceWakeups {
  PendingWork calls;
  int count = 0;
  MaintenanceWakeups() {
    calls.on_work([this] { ++count; });
  }
  /// Whether this work calls it.
  bool is_called_for(const DueWork& work) {
    const int before = count;
    calls.see(work);
    return count > before;
  }
};

}  // namespace

// --- pressure -----------------------------------------------------------------------------------

TEST(pressure_lasts_while_requested) {
  Pressure pressure;
  CHECK(!pressure.is_in_force() && pressure.floor(kStart) == 0);
  pressure.begin(3, kStart);
  CHECK(pressure.pages() == 3 && pressure.floor(kStart) == 3);
  CHECK(!pressure.expire(true, kStart + Pressure::kExpiry - milliseconds(1)));
  pressure.begin(3, kStart + milliseconds(400));  // asked for again
  CHECK(!pressure.expire(true, kStart + Pressure::kExpiry));
  CHECK(pressure.expire(true, kStart + milliseconds(400) + Pressure::kExpiry));
  CHECK(!pressure.is_in_force());
  // Nobody's request was met: the next one may take as much as it likes.
  CHECK(pressure.floor(kStart + milliseconds(900)) == 0);
}

TEST(satisfied_pressure_sets_a_floor_for_repeats) {
  Pressure pressure;
  pressure.begin(3, kStart);
  CHECK(pressure.expire(false, kStart + milliseconds(1)));
  CHECK(pressure.pages() == Pressure::kNone);
  CHECK(pressure.floor(kStart + Pressure::kRepeatedFor) == 3);
  CHECK(pressure.floor(kStart + milliseconds(1) + Pressure::kRepeatedFor) == 0);
}

TEST(lowest_of_request_capacity_and_pressure_applies) {
  PageLimit limit(10 * kPage, 6 * kPage, kPage, 100);
  CHECK(limit.pages() == 6 && limit.requested_bytes() == 10 * kPage);
  limit.see_capacity(20 * kPage);
  CHECK(limit.pages() == 10 && limit.has_seen(20 * kPage));
  limit.pressure.begin(4, kStart);
  CHECK(limit.pages() == 4 && limit.is_under_pressure());
  limit.request(2 * kPage, 20 * kPage);
  CHECK(limit.pages() == 2 && !limit.is_under_pressure());
  limit.request(0, 20 * kPage);
  CHECK(limit.pages() == 1);  // the null block's
  limit.set_asleep(true);
  CHECK(limit.pages() == 0 && !limit.is_under_pressure());
  limit.set_asleep(false);
  limit.request(~std::uint64_t{0}, ~std::uint64_t{0});
  CHECK(limit.pages() == 4);
  CHECK(limit.pressure.expire(false, kStart) && limit.pages() == 100);  // the range's
}

// --- memory_wait
// ----------------------------------------------------------------------------------

TEST(memory_wait_lasts_while_pages_are_wanted) {
  constexpr milliseconds lease(100);
  MemoryWait memory_wait;
  CHECK(memory_wait.pages() == 0 && memory_wait.may_wait(kStart));
  memory_wait.begin(5, kStart);
  CHECK(!memory_wait.may_request(kStart + MemoryWait::kRequestAgain - milliseconds(1)));
  CHECK(memory_wait.may_request(kStart + MemoryWait::kRequestAgain));
  CHECK(memory_wait.is_current(lease, kStart + lease));
  CHECK(!memory_wait.is_current(lease, kStart + lease + milliseconds(1)));
  memory_wait.renew(kStart + milliseconds(50));
  CHECK(memory_wait.is_current(lease, kStart + milliseconds(50) + lease));
  memory_wait.got(3);
  CHECK(memory_wait.pages() == 2);
  memory_wait.got(3);  // more than was missing
  CHECK(memory_wait.pages() == 0);
}

TEST(fruitless_memory_wait_suspends_further_waits) {
  MemoryWait memory_wait;
  const MemoryWait::Time later = kStart + milliseconds(50) * MemoryWait::kFruitlessWaits;
  memory_wait.waited_in_vain(milliseconds(50), kStart);
  memory_wait.begin(1, kStart);
  CHECK(!memory_wait.may_wait(later - milliseconds(1)) && memory_wait.may_wait(later));
  memory_wait.end();  // what was missing is there: others do give
  CHECK(memory_wait.may_wait(kStart));
}

// --- maintenance wakeups -------------------------------------------------------------------------

TEST(maintenance_wakes_for_new_work_without_counter_change) {
  // The limit is lowered while pages are on their way: too much is held, and nothing can be given.
  // The pages land. As much is held as before, and now it can be given back: the maintenance
  // thread, which has acknowledged that value already, must be woken.
  MaintenanceWakeups maintenance;
  DueWork work;
  work.over_pages = 4;
  CHECK(maintenance.is_called_for(work));  // to answer
  CHECK(!maintenance.is_called_for(work));
  {
    const PendingWork::Enforcing enforcing(maintenance.calls);
    CHECK(!maintenance.is_called_for(work));
  }
  work.enforce = true;
  CHECK(maintenance.is_called_for(work));
  CHECK(!maintenance.is_called_for(work));  // once: where it fails it tries again in its own time
  // It enforces. What it finds meanwhile is its own; what lands after it is a call again.
  {
    const PendingWork::Enforcing enforcing(maintenance.calls);
    {
      const PendingWork::Enforcing of_another_thread(maintenance.calls);
    }
    work.enforce = false;
    CHECK(!maintenance.is_called_for(work));
    work.enforce = true;
    CHECK(!maintenance.is_called_for(work));
    work.enforce = false;
  }
  CHECK(!maintenance.is_called_for(work));
  work.enforce = true;
  CHECK(maintenance.is_called_for(work));
}

TEST(maintenance_wakes_once_per_kind_of_work) {
  MaintenanceWakeups maintenance;
  DueWork work;
  CHECK(!maintenance.is_called_for(work));
  for (bool DueWork::* thing : {&DueWork::enforce, &DueWork::provision, &DueWork::decay,
                                &DueWork::watch, &DueWork::pursue, &DueWork::failed}) {
    work.*thing = true;
    CHECK(maintenance.is_called_for(work));
    CHECK(!maintenance.is_called_for(work));
  }
  for (const std::uint64_t over : {1, 2, 0}) {
    work.over_pages = over;
    CHECK(maintenance.is_called_for(work));
    CHECK(!maintenance.is_called_for(work));
  }
}

TEST(maintenance_wakes_again_after_work_is_done) {
  MaintenanceWakeups maintenance;
  DueWork work;
  work.provision = work.decay = work.pursue = true;
  CHECK(maintenance.is_called_for(work));
  CHECK(maintenance.calls.take_provision() && !maintenance.calls.take_provision());
  CHECK(maintenance.is_called_for(work));
  CHECK(maintenance.calls.is_decay_armed() && !maintenance.calls.arm_decay(false));
  CHECK(maintenance.is_called_for(work));
  maintenance.calls.end_pursuit();
  CHECK(maintenance.is_called_for(work));
  CHECK(!maintenance.is_called_for(work));
  // Another maintenance thread has been called for nothing yet.
  maintenance.calls.on_work([&] { ++maintenance.count; });
  CHECK(maintenance.is_called_for(work));
}

// --- provisioning --------------------------------------------------------------------------------

TEST(provisioning_matches_the_pages_taken) {
  Provisioning provisioning(2, 6, true);
  CHECK(!provisioning.is_due(0));  // nobody has taken any
  provisioning.took(4);
  CHECK(provisioning.is_due(1) && !provisioning.is_due(2));
  CHECK(provisioning.take_due(1) == 3);
  CHECK(!provisioning.is_due(0));  // what is trimmed does not come back by itself
  provisioning.took(1);
  CHECK(provisioning.take_due(0) == 2);  // the least
  provisioning.took(50);
  CHECK(provisioning.take_due(1) == 5);  // the most
  provisioning.took(3);
  CHECK(provisioning.take_due(9) == 0);
  Provisioning never(2, 6, false);
  never.took(4);
  CHECK(!never.is_due(0));
}

TEST(deferred_pages_stay_wanted) {
  Provisioning provisioning(2, 6, true);
  provisioning.took(5);
  CHECK(provisioning.take_due(0) == 5);
  provisioning.put_back(4, 1);  // one came in
  CHECK(provisioning.is_due(1) && provisioning.take_due(1) == 4);
}

TEST(preallocated_pages_are_bounded_in_bytes) {
  constexpr std::uint64_t kMiB = 1 << 20;
  CHECK(pages_ahead(10, 2 * kMiB) == 10);
  CHECK(pages_ahead(10, 16 * kMiB) == 10);
  CHECK(pages_ahead(10, 34 * kMiB) == 7);
  CHECK(pages_ahead(10, 128 * kMiB) == 2);
  CHECK(pages_ahead(1, 128 * kMiB) == 1);
  CHECK(pages_ahead(10, 1024 * kMiB) == 1);
  CHECK(pages_ahead(0, 128 * kMiB) == 0);
}

TEST(copy_wait_spins_before_pausing) {
  const PausesAfterSpin::Time begin{std::chrono::hours(1)};
  const std::chrono::nanoseconds ns{1};
  PausesAfterSpin pauses(begin);
  CHECK(pauses.next(begin).count() == 0);
  CHECK(pauses.next(begin + PausesAfterSpin::kSpin - ns).count() == 0);
  CHECK(pauses.next(begin + PausesAfterSpin::kSpin) == Pauses::kFirst);
  CHECK(pauses.next(begin + PausesAfterSpin::kSpin + ns) == 2 * Pauses::kFirst);
}

TEST(preallocation_waits_for_loads_with_a_bound) {
  const LoadsFirst::Time start{std::chrono::hours(1)};
  const std::chrono::milliseconds ms{1};
  LoadsFirst loads;
  CHECK(!loads.go_first(start));
  loads.begin(start);
  CHECK(loads.go_first(start + 5 * ms));
  loads.begin(start + 5 * ms);
  loads.end(start + 6 * ms);
  CHECK(loads.go_first(start + 500 * ms));  // one is still under way
  CHECK(!loads.go_first(start + LoadsFirst::kLongest));
  const LoadsFirst::Time last = start + 600 * ms;
  loads.end(last);
  CHECK(loads.go_first(last + LoadsFirst::kMore - ms));  // there may be more
  CHECK(!loads.go_first(last + LoadsFirst::kMore));
  // After a pause the time they have begins anew; without one it goes on.
  const LoadsFirst::Time later = start + 10 * LoadsFirst::kLongest;
  loads.begin(later);
  loads.end(later);
  loads.begin(later + LoadsFirst::kMore - ms);
  CHECK(loads.go_first(later + LoadsFirst::kLongest - ms));
  CHECK(!loads.go_first(later + LoadsFirst::kLongest));
}

TEST(parked_pages_are_idle_if_unneeded) {
  Provisioning provisioning(0, 0, true);
  (void)provisioning.take_use(5);
  provisioning.see_parked(3);
  provisioning.took(2);
  provisioning.see_parked(5);
  const ParkedUse use = provisioning.take_use(5);
  CHECK(use.unneeded_pages == 3 && use.taken_pages == 2);
  const ParkedUse next = provisioning.take_use(5);
  CHECK(next.unneeded_pages == 5 && next.taken_pages == 0);
}

TEST(parked_pages_decay_by_half_then_completely) {
  const ParkedDecay::Time start{std::chrono::hours(1)};
  const std::chrono::seconds s{1};
  ParkedDecay decay(5 * s);
  CHECK(!decay.is_running());
  decay.begin(start, {0, 64}, 7);  // a burst took 64 pages, and has ended
  std::uint64_t parked = 64;
  std::vector<std::uint64_t> left;
  for (ParkedDecay::Time now = start + s; decay.is_running(); now += s) {
    CHECK(decay.due() == now);
    CHECK(decay.is_idle(7) == (now >= start + 5 * s));
    parked -= decay.step(now, {parked, 0});
    left.push_back(parked);
    if (parked == 0) decay.end();
  }
  CHECK((left == std::vector<std::uint64_t>{32, 32, 32, 32, 0}));
}

TEST(parked_pages_match_the_alloc_rate) {
  const ParkedDecay::Time start{std::chrono::hours(1)};
  const std::chrono::seconds s{1};
  ParkedDecay decay(5 * s);
  decay.begin(start, {0, 10}, 0);
  std::uint64_t parked = 64;
  // Two pages a second are taken and freed again; the others are parked all the time.
  for (int step = 1; step <= 10; ++step) {
    parked -= decay.step(start + step * s, {parked - 2, 2});
    CHECK(!decay.is_idle(static_cast<std::uint64_t>(step)));
  }
  CHECK(parked == 10 + 2);
  // The rate falls to nothing.
  for (int step = 11; step <= 15; ++step) parked -= decay.step(start + step * s, {parked, 0});
  CHECK(parked == 0);
}

TEST(later_parked_pages_are_halved_too) {
  const ParkedDecay::Time start{std::chrono::hours(1)};
  const std::chrono::seconds s{1};
  ParkedDecay decay(5 * s);
  decay.begin(start, {0, 100}, 0);
  CHECK(decay.step(start + s, {40, 0}) == 20);
  CHECK(decay.step(start + 2 * s, {20, 0}) == 0);
  CHECK(decay.step(start + 3 * s, {20 + 40, 0}) == 20);  // 40 more were parked meanwhile
}

// --- accounting ----------------------------------------------------------------------------------

TEST(reserved_blocks_are_allocated_first_and_not_freeable) {
  Books books(2);
  Accounting& accounting = books.accounting;
  const std::vector<BlockId> reserved = books.take(3);
  accounting.reserve(reserved);
  CHECK(accounting.in_use() == 0 && accounting.reserved_blocks() == 3 && books.sound());
  CHECK(accounting.refuse_reserved(std::span(reserved).first(1)).error().code == Errc::kDoubleFree);
  const std::vector<BlockId> got = books.take(4);
  CHECK(std::set<BlockId>(got.begin(), got.end()).contains(reserved[0]));
  CHECK(accounting.in_use() == 4 && accounting.reserved_blocks() == 0);
  CHECK(!accounting.drop_reserved());
  CHECK(books.sound());
}

TEST(can_give_depends_on_blocks_pages_and_limit) {
  Books books(2);
  Accounting& accounting = books.accounting;
  CHECK(!accounting.can_give());
  accounting.limit.request(kPage, kPages * kPage);
  CHECK(accounting.over_pages() == 1 && accounting.can_give());  // page 1 is parked
  const std::vector<BlockId> ids = books.take(2 * kBlocksPerPage - 1);
  CHECK(!accounting.can_give());  // all in use
  CHECK(static_cast<bool>(accounting.blocks().cache(std::span(ids).first(1))));
  CHECK(accounting.can_give());
  accounting.evict_all();
  CHECK(accounting.has_changes());
  CHECK(accounting.take_changes().size() == 1 && !accounting.has_changes());
  // A page on its way is over the limit, and nothing can be done about it yet.
  accounting.hold(1);
  CHECK(accounting.over_pages() == 2 && accounting.moving_pages() == 1 && !accounting.can_give());
  accounting.blocks().add_page(*accounting.blocks().take_unmapped());
  CHECK(accounting.can_give());
  // One that is on its way out is held, and never to be found again: nor is another one for it.
  CHECK(accounting.excess_pages() == 2);
  const std::optional<PageIndex> page = accounting.blocks().take_parked();
  accounting.begin_unmap(1);
  CHECK(accounting.over_pages() == 2 && accounting.excess_pages() == 1 && books.sound());
  accounting.cancel_unmap(1);
  accounting.blocks().add_page(*page);
  CHECK(accounting.excess_pages() == 2 && accounting.staying_pages() == accounting.held_pages());
  accounting.begin_unmap(1);
  CHECK(!accounting.check_integrity());  // no page is on its way
  accounting.cancel_unmap(1);
  accounting.fail({Errc::kPoolFailed, "gone"});
  CHECK(!accounting.can_give() && accounting.has_failed());
  CHECK(accounting.count_available(Accounting::Reach::kLimit) == 0);
  accounting.fail({Errc::kChannelClosed, "later"});
  CHECK(accounting.failure()->code == Errc::kPoolFailed);  // the first
  CHECK(books.sound());
}

TEST(asleep_pool_can_give_the_null_page) {
  Books books(1);
  CHECK(!books.accounting.can_give());
  books.accounting.limit.set_asleep(true);
  CHECK(books.accounting.can_give());
  books.accounting.limit.set_asleep(false);
  const std::vector<BlockId> ids = books.take(1);
  books.accounting.limit.set_asleep(true);
  CHECK(!books.accounting.can_give());
  CHECK(static_cast<bool>(books.accounting.blocks().free(ids)));
  CHECK(books.accounting.can_give());
}

TEST(cache_bound_evicts_whole_pages_if_equally_cheap) {
  Books books(3);
  Accounting& accounting = books.accounting;
  const std::vector<BlockId> ids = books.take(3 * kBlocksPerPage - 1);
  const auto of_page = [&](std::uint64_t page) {
    std::vector<BlockId> some;
    for (const BlockId id : ids) {
      if (static_cast<std::uint64_t>(id) / kBlocksPerPage == page) some.push_back(id);
    }
    return some;
  };
  const std::vector<BlockId> one = of_page(1), two = of_page(2);
  CHECK(static_cast<bool>(accounting.blocks().cache(one)));
  CHECK(static_cast<bool>(accounting.blocks().cache(std::span(two).first(2))));
  CHECK(static_cast<bool>(accounting.blocks().free(std::span(two).subspan(2))));
  accounting.evict_down_to(kBlocksPerPage);  // page 2 is just the 2 too many
  CHECK(accounting.blocks().parked_pages() == 1);
  accounting.evict_down_to(kBlocksPerPage - 1);  // no page is that cheap: the oldest
  const std::vector<BlockChange> changes = accounting.take_changes();
  CHECK(changes.size() == 3 && changes[2].id == one[0] && changes[2].to == BlockChange::kEvicted);
  CHECK(books.counters[Counter::kBlocksEvicted] == 3);
  CHECK(books.sound());
}

TEST(evictions_and_moves_are_reported_in_order) {
  Books books(3);
  Accounting& accounting = books.accounting;
  const std::vector<BlockId> ids = books.take(3 * kBlocksPerPage - 1);
  std::vector<BlockId> first, last;
  for (const BlockId id : ids) {
    (static_cast<std::uint64_t>(id) / kBlocksPerPage == 2 ? last : first).push_back(id);
  }
  CHECK(static_cast<bool>(accounting.blocks().free(std::span(first).first(1))));
  CHECK(static_cast<bool>(accounting.blocks().cache(std::span(last).first(2))));
  CHECK(static_cast<bool>(accounting.blocks().free(std::span(last).subspan(2))));
  accounting.evict_oldest(1);
  std::vector<BlockMove> moves;
  REQUIRE(accounting.blocks().take_compaction(moves));
  CHECK(accounting.finish_moves(moves, true) == 1);
  const std::vector<BlockChange> changes = accounting.take_changes();
  REQUIRE(changes.size() == 2);
  CHECK(changes[0].id == last[0] && changes[0].to == BlockChange::kEvicted);
  CHECK(changes[1].id == last[1] && changes[1].to == first[0]);
  CHECK(books.sound());
}

}  // namespace kvelastic
