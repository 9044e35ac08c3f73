// An instance's devices as one: who waits for a claim hears of it when another thread gives it up.
#include "../places.h"
#include "check.h"
#include "ledger_fixture.h"

namespace kvelastic {
namespace {

constexpr auto kAMoment = std::chrono::milliseconds(30);

std::shared_ptr<Places> places_over(std::shared_ptr<LedgerMember> member) {
  Result<std::shared_ptr<Places>> made = Places::create({{std::move(member), {0}}}, kPage);
  CHECK(static_cast<bool>(made));
  return *made;
}

TEST(places_a_reserve_that_sleep_gives_up_is_not_said_to_be_there) {
  Ledger ledger;
  auto other = ledger.join();
  const std::shared_ptr<Places> places = places_over(ledger.join());
  LedgerMember& own = *places->all().front().member;
  CHECK(other->grant(60, kPage) == 60);
  const Result<Places::Claimed> claimed = places->ask_to_reserve({20 * kPage});
  REQUIRE(claimed && *claimed != Places::kNothingClaimed);
  places->fall_asleep();  // by the keeper, say, before the other thread begins to wait
  const Status there = places->wait_for_claim(*claimed, kAMoment);
  CHECK(!there && there.error().code == Errc::kReserve);
  CHECK(own.reserve_bytes() == 0 && places->is_asleep());
}

TEST(places_what_is_there_at_once_is_not_waited_for) {
  Ledger ledger;
  const std::shared_ptr<Places> places = places_over(ledger.join());
  const Result<Places::Claimed> claimed = places->ask_to_reserve({20 * kPage});
  REQUIRE(claimed);
  CHECK(static_cast<bool>(places->wait_for_claim(*claimed, kAMoment)));
  CHECK(places->all().front().member->reserve_bytes() == 20 * kPage);
  places->fall_asleep();
  CHECK(static_cast<bool>(places->wait_for_claim(*claimed, kAMoment)));  // it was there
  const Result<Places::Claimed> awake = places->ask_to_wake();
  REQUIRE(awake);
  CHECK(static_cast<bool>(places->wait_for_claim(*awake, kAMoment)) && !places->is_asleep());
  const Result<Places::Claimed> again = places->ask_to_wake();
  CHECK(again && *again == Places::kNothingClaimed);
  CHECK(static_cast<bool>(places->wait_for_claim(*again, kAMoment)));
}

}  // namespace
}  // namespace kvelastic
