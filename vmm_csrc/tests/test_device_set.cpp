// An instance's devices as one: who waits for a claim hears of it when another thread gives it up.
#include "check.h"
#include "ledger/device_set.h"
#include "ledger_fixture.h"

namespace kvelastic {
namespace {

constexpr auto kAMoment = std::chrono::milliseconds(30);

std::shared_ptr<DeviceSet> places_over(std::shared_ptr<LedgerMember> member) {
  Result<std::shared_ptr<DeviceSet>> made = DeviceSet::create({{std::move(member), {0}}}, kPage);
  CHECK(static_cast<bool>(made));
  return *made;
}

TEST(reserve_dropped_by_sleep_fails_its_wait) {
  Ledger ledger;
  auto other = ledger.join();
  const std::shared_ptr<DeviceSet> device_set = places_over(ledger.join());
  LedgerMember& own = *device_set->all().front().member;
  CHECK(other->grant(60, kPage) == 60);
  const Result<DeviceSet::Claimed> claimed = device_set->claim_reserve({20 * kPage});
  REQUIRE(claimed && *claimed != DeviceSet::kNothingClaimed);
  device_set->fall_asleep();  // e.g. by maintenance, before the other thread begins to wait
  const Status there = device_set->wait_for_claim(*claimed, kAMoment);
  CHECK(!there && there.error().code == Errc::kReserve);
  CHECK(own.reserve_bytes() == 0 && device_set->is_asleep());
}

TEST(reserve_dropped_by_sleep_fails_after_wake) {
  Ledger ledger;
  auto other = ledger.join();
  const std::shared_ptr<DeviceSet> device_set = places_over(ledger.join());
  CHECK(other->grant(60, kPage) == 60);
  const Result<DeviceSet::Claimed> claimed = device_set->claim_reserve({20 * kPage});
  REQUIRE(claimed);
  device_set->fall_asleep();  // the maintenance thread, before the reserving thread looks again
  const Result<DeviceSet::Claimed> awake = device_set->claim_wake();
  REQUIRE(awake);
  CHECK(static_cast<bool>(device_set->wait_for_claim(*awake, kAMoment)) &&
        !device_set->is_asleep());
  const Status there = device_set->wait_for_claim(*claimed, kAMoment);
  CHECK(!there && there.error().code == Errc::kReserve);
  CHECK(device_set->all().front().member->reserve_bytes() == 0);
}

TEST(timed_out_claim_does_not_fail_later_claims) {
  Ledger ledger;
  auto other = ledger.join();
  const std::shared_ptr<DeviceSet> device_set = places_over(ledger.join());
  CHECK(other->grant(60, kPage) == 60);
  const Result<DeviceSet::Claimed> first = device_set->claim_reserve({20 * kPage});
  const Result<DeviceSet::Claimed> second = device_set->claim_reserve({10 * kPage});
  REQUIRE(first && second);
  const Status there = device_set->wait_for_claim(*first, kAMoment);
  CHECK(!there && there.error().code == Errc::kReserve);
  other->give_back(10, kPage);
  CHECK(static_cast<bool>(device_set->wait_for_claim(*second, kSoon)));
  CHECK(device_set->all().front().member->reserve_bytes() == 10 * kPage);
}

TEST(wake_after_sleeping_reserve_is_not_lost) {
  Ledger ledger;
  const std::shared_ptr<DeviceSet> device_set = places_over(ledger.join());
  device_set->fall_asleep();
  const Result<DeviceSet::Claimed> claimed = device_set->claim_reserve({20 * kPage});
  REQUIRE(claimed);
  const Result<DeviceSet::Claimed> awake = device_set->claim_wake();  // before it is waited for
  REQUIRE(awake);
  CHECK(static_cast<bool>(device_set->wait_for_claim(*awake, kAMoment)) &&
        !device_set->is_asleep());
  CHECK(static_cast<bool>(device_set->wait_for_claim(*claimed, kAMoment)));
  CHECK(device_set->all().front().member->reserve_bytes() == 20 * kPage);
}

TEST(available_claim_is_met_without_waiting) {
  Ledger ledger;
  const std::shared_ptr<DeviceSet> device_set = places_over(ledger.join());
  const Result<DeviceSet::Claimed> claimed = device_set->claim_reserve({20 * kPage});
  REQUIRE(claimed);
  CHECK(static_cast<bool>(device_set->wait_for_claim(*claimed, kAMoment)));
  CHECK(device_set->all().front().member->reserve_bytes() == 20 * kPage);
  device_set->fall_asleep();
  CHECK(static_cast<bool>(device_set->wait_for_claim(*claimed, kAMoment)));  // it was there
  const Result<DeviceSet::Claimed> awake = device_set->claim_wake();
  REQUIRE(awake);
  CHECK(static_cast<bool>(device_set->wait_for_claim(*awake, kAMoment)) &&
        !device_set->is_asleep());
  const Result<DeviceSet::Claimed> again = device_set->claim_wake();
  CHECK(again && *again == DeviceSet::kNothingClaimed);
  CHECK(static_cast<bool>(device_set->wait_for_claim(*again, kAMoment)));
}

}  // namespace
}  // namespace kvelastic
