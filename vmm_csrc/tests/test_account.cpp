// The account of a device: what is guaranteed and reserved counts while a member is awake, a wake
// asks for it first, and whatever happens at once, the sums hold.
#include <signal.h>

#include <array>
#include <barrier>
#include <random>

#include "base/size_text.h"
#include "check.h"
#include "ledger/device_account.h"
#include "ledger/ledger.h"
#include "ledger_fixture.h"

namespace kvelastic {
namespace {

constexpr auto kAMoment = std::chrono::milliseconds(30);

LedgerIdentity named(const std::string& name) {
  LedgerIdentity identity = me();
  std::copy(name.begin(), name.end(), identity.name.begin());
  return identity;
}

bool is_sound(Ledger& ledger) {
  return static_cast<bool>(LedgerView::open(ledger.bytes())->check_integrity());
}

/// A member that gives what it is asked for, as a maintenance thread does, until it ends.
class Giver {
 public:
  Giver(LedgerMember& member, std::uint64_t pages) : member_(member), pages_(pages) {
    CHECK(member.grant(pages, kPage) == pages);
    member.publish(0, pages * kPage, 0, kPage, false);
    thread_ = std::thread([this] {
      std::uint32_t seen = member_.bell();
      while (!stop_) {
        const std::uint64_t bytes = member_.open_reclaim().bytes;
        const std::uint64_t given = std::min(pages_, (bytes + kPage - 1) / kPage);
        pages_ -= given;
        member_.publish(0, pages_ * kPage, 0, kPage, false);
        member_.give_back(given, kPage);
        member_.handled(bytes);
        member_.wait(std::exchange(seen, member_.bell()), std::chrono::milliseconds(1));
      }
    });
  }
  ~Giver() {
    stop_ = true;
    thread_.join();
  }

 private:
  LedgerMember& member_;
  std::uint64_t pages_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace

TEST(gpu_account_subtracts_reserves_from_capacity) {
  const DeviceMemorySize gpu{100, 0};
  CHECK(gpu.left_for_caches(30) == 70 && gpu.left_for_caches(130) == 0);
  CHECK(gpu.has_room_for(70, 30) && !gpu.has_room_for(71, 30) && !gpu.has_room_for(0, 101));
  CHECK(static_cast<bool>(check_account(gpu, 70, 70, 30)));
  CHECK(!check_account(gpu, 71, 0, 30) && !check_account(gpu, 0, 71, 30));
}

TEST(host_account_uses_memory_outside_capacity_first) {
  const DeviceMemorySize host{80, 100};
  CHECK(host.left_for_caches(20) == 80 && host.left_for_caches(30) == 70);
  CHECK(host.has_room_for(80, 20) && host.has_room_for(0, 100) && !host.has_room_for(0, 101));
  const DeviceMemorySize overstated{200, 100};
  CHECK(overstated.outside_bytes() == 0 && overstated.left_for_caches(50) == 150);
  CHECK(saturating_add(~std::uint64_t{0}, 2) == ~std::uint64_t{0} && saturating_sub(1, 2) == 0);
}

TEST(account_grants_reserves_only_while_owner_sleeps) {
  Ledger ledger;
  auto a = ledger.join();
  auto b = ledger.join();
  REQUIRE(a && b);
  CHECK(static_cast<bool>(a->claim_reserve(40 * kPage)) && a->claim_is_met());
  CHECK(b->room(kPage) == 24 && b->grant(99, kPage) == 24);
  CHECK(is_sound(ledger));
  a->fall_asleep();
  CHECK(a->reserve_bytes() == 40 * kPage && a->is_asleep());
  CHECK(b->grant(99, kPage) == 40);
  CHECK(is_sound(ledger));
}

TEST(account_ignores_guarantees_and_reserves_of_sleeping_members) {
  Ledger ledger;
  auto a = ledger.join(64 * kPage);
  REQUIRE(a);
  CHECK(!ledger.try_join(me(), kPage));
  a->fall_asleep();
  CHECK(a->min_bytes() == 64 * kPage);
  auto b = ledger.try_join(named("greedy"), 30 * kPage);
  REQUIRE(static_cast<bool>(b));
  // And it is told who has it now, and sleeps on as before.
  Status refused = a->claim_wake();
  CHECK(!refused && refused.error().code == Errc::kGuarantee);
  CHECK(refused.error().message.find("greedy has " + size_text(30 * kPage)) != std::string::npos);
  CHECK(a->is_asleep() && a->min_bytes() == 64 * kPage && is_sound(ledger));
  CHECK((*b)->grant(99, kPage) == 64);
  CHECK(static_cast<bool>((*b)->set_min(64 * kPage)));
  (*b)->leave();
  CHECK(static_cast<bool>(a->claim_wake()) && !a->is_asleep());
  CHECK(!ledger.try_join(me(), kPage));
}

TEST(account_checks_guarantee_set_asleep_at_wake) {
  Ledger ledger;
  auto a = ledger.join();
  auto b = ledger.join(40 * kPage);
  REQUIRE(a && b);
  a->fall_asleep();
  CHECK(static_cast<bool>(a->set_min(30 * kPage)));
  CHECK(static_cast<bool>(a->claim_reserve(5 * kPage)));
  CHECK(a->set_min(60 * kPage).error().code == Errc::kGuarantee);  // never possible
  CHECK(a->claim_reserve(35 * kPage).error().code == Errc::kGuarantee);
  CHECK(a->claim_wake().error().code == Errc::kGuarantee);
  CHECK(static_cast<bool>(b->set_min(29 * kPage)));
  CHECK(static_cast<bool>(a->claim_wake()) && !a->is_asleep());
  CHECK(b->set_min(30 * kPage).error().code == Errc::kGuarantee);
}

TEST(account_wake_reclaims_its_reserve_from_others) {
  Ledger ledger;
  auto a = ledger.join();
  auto b = ledger.join(10 * kPage);
  REQUIRE(a && b);
  CHECK(static_cast<bool>(a->claim_reserve(50 * kPage)));
  a->fall_asleep();
  {
    Giver giver(*b, 64);
    CHECK(static_cast<bool>(a->claim_wake()));
    CHECK(a->is_asleep());  // nothing is there yet
    CHECK(b->room(kPage) == 0);
    CHECK(static_cast<bool>(a->wait_for_claim(kSoon)));
  }
  CHECK(!a->is_asleep() && b->granted_bytes() <= 14 * kPage);
  CHECK(is_sound(ledger));
}

TEST(account_timed_out_wake_names_the_holders) {
  Ledger ledger;
  auto a = ledger.join(2 * kPage);
  auto b = ledger.try_join(named("holder"));
  REQUIRE(a && b);
  CHECK(static_cast<bool>(a->claim_reserve(50 * kPage)));
  a->fall_asleep();
  CHECK((*b)->grant(30, kPage) == 30);
  CHECK(static_cast<bool>(a->claim_wake()));
  Status refused = a->wait_for_claim(kAMoment);
  CHECK(!refused && refused.error().code == Errc::kReserve);
  CHECK(refused.error().message.find("holder has " + size_text(30 * kPage)) != std::string::npos);
  CHECK(a->is_asleep() && a->reserve_bytes() == 50 * kPage && is_sound(ledger));
  CHECK((*b)->grant(99, kPage) == 34);  // nothing is kept from others
  CHECK(static_cast<bool>((*b)->set_min(64 * kPage)));
}

TEST(account_raises_reserve_only_if_memory_is_available) {
  Ledger ledger;
  auto a = ledger.join();
  auto b = ledger.try_join(named("holder"), 20 * kPage);
  REQUIRE(a && b);
  CHECK(static_cast<bool>(a->claim_reserve(10 * kPage)));
  CHECK((*b)->grant(54, kPage) == 54);
  Status refused = a->claim_reserve(45 * kPage);
  CHECK(!refused && refused.error().code == Errc::kGuarantee);
  CHECK(a->reserve_bytes() == 10 * kPage);
  CHECK(static_cast<bool>(a->claim_reserve(40 * kPage)));
  CHECK(a->reserve_bytes() == 10 * kPage && !a->claim_is_met());
  refused = a->wait_for_claim(kAMoment);
  CHECK(!refused && refused.error().code == Errc::kReserve);
  CHECK(a->reserve_bytes() == 10 * kPage && !a->is_asleep() && is_sound(ledger));
  (*b)->give_back(30, kPage);
  CHECK(static_cast<bool>(a->claim_reserve(40 * kPage)) && a->reserve_bytes() == 40 * kPage);
  CHECK((*b)->grant(99, kPage) == 0);
  CHECK(static_cast<bool>(a->claim_reserve(3 * kPage)));  // less holds at once
  CHECK((*b)->grant(99, kPage) == 37 && is_sound(ledger));
}

TEST(account_refuses_join_with_oversized_reserve) {
  Ledger ledger;
  auto a = ledger.join(60 * kPage);
  REQUIRE(a);
  auto refused = LedgerMember::join(ledger.bytes(),
                                    {.identity = me(),
                                     .reserve_bytes = 5 * kPage,
                                     .file = *LivenessFile::of(ledger.file.path, ledger.file.fd)},
                                    nullptr);
  CHECK(!refused && refused.error().code == Errc::kGuarantee);
  CHECK(ledger.members().size() == 1 && is_sound(ledger));
  auto joined = LedgerMember::join(ledger.bytes(),
                                   {.identity = me(),
                                    .reserve_bytes = 4 * kPage,
                                    .file = *LivenessFile::of(ledger.file.path, ledger.file.fd)},
                                   nullptr);
  CHECK(static_cast<bool>(joined) && a->grant(99, kPage) == 60);
}

TEST(account_refuses_capacity_below_guarantees_and_reserves) {
  Ledger ledger;
  auto a = ledger.join(10 * kPage);
  REQUIRE(a);
  CHECK(static_cast<bool>(a->claim_reserve(20 * kPage)));
  const LivenessCheck liveness(ledger.file.fd);
  CHECK(ledger_set_capacity(ledger.bytes(), 29 * kPage, liveness).error().code == Errc::kGuarantee);
  CHECK(ledger_set_capacity(ledger.bytes(), 19 * kPage, liveness).error().code == Errc::kGuarantee);
  CHECK(a->capacity_bytes() == 64 * kPage);
  CHECK(static_cast<bool>(ledger_set_capacity(ledger.bytes(), 30 * kPage, liveness)));
  CHECK(a->grant(99, kPage) == 10 && is_sound(ledger));
  a->fall_asleep();
  CHECK(static_cast<bool>(ledger_set_capacity(ledger.bytes(), 29 * kPage, liveness)));
  CHECK(a->claim_wake().error().code == Errc::kGuarantee);
}

TEST(account_foreign_usage_excludes_grants_and_reserves) {
  Ledger ledger;
  auto a = ledger.join();
  REQUIRE(a && a->grant(10, kPage) == 10);
  a->arrived(10, kPage);
  CHECK(static_cast<bool>(a->claim_reserve(20 * kPage)));
  CHECK(a->see_device(a->moment(), 80 * kPage, 45 * kPage) == Sight::kExact);  // 35 are taken
  CHECK(ledger.layout().others_bytes == 5 * kPage);
  CHECK(a->room(kPage) == 64 - 10 - 20 - 5);
}

TEST(account_grants_one_of_two_competing_wakes) {
  Ledger ledger;
  std::array<std::unique_ptr<LedgerMember>, 2> all{ledger.join(), ledger.join()};
  REQUIRE(all[0] && all[1]);
  for (auto& member : all) {
    member->fall_asleep();
    CHECK(static_cast<bool>(member->set_min(20 * kPage)));
    CHECK(static_cast<bool>(member->claim_reserve(20 * kPage)));
  }
  constexpr int kRounds = 200;
  std::barrier step(3);
  std::vector<std::thread> threads;
  std::atomic<int> refused{0};
  for (auto& member : all) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        step.arrive_and_wait();
        if (!member->claim_wake()) ++refused;
        step.arrive_and_wait();
        step.arrive_and_wait();
        member->fall_asleep();
      }
    });
  }
  for (int round = 0; round < kRounds; ++round) {
    step.arrive_and_wait();
    CHECK(is_sound(ledger));
    step.arrive_and_wait();
    CHECK(all[0]->is_asleep() != all[1]->is_asleep());
    CHECK(is_sound(ledger));
    step.arrive_and_wait();
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(refused == kRounds);
}

TEST(account_member_killed_during_wake_leaves_no_reserve) {
  Ledger ledger;
  auto a = ledger.join();
  REQUIRE(a && a->grant(30, kPage) == 30);
  const pid_t child = ::fork();
  if (child == 0) {
    auto dying = ledger.try_join(me(), 10 * kPage);
    LedgerMember& member = **dying;
    member.fall_asleep();
    (void)member.claim_reserve(54 * kPage);
    (void)member.claim_wake();
    (void)member.wait_for_claim(std::chrono::hours(1));
    ::_exit(1);
  }
  CHECK(soon([&] { return ledger.layout().slots[1].pledged_bytes == 54 * kPage; }));
  CHECK(a->grant(1, kPage) == 0 && soon([&] { return a->open_reclaim().bytes > 0; }));
  int status = 0;
  CHECK(::kill(child, SIGKILL) == 0 && ::waitpid(child, &status, 0) == child);
  CHECK(ledger.reap() == 1);
  CHECK(a->grant(99, kPage) == 34 && is_sound(ledger));
}

TEST(account_member_killed_during_check_blocks_no_others) {
  Ledger ledger;
  const std::size_t index = ledger.one_that_died(a_dead_one(), 3);
  ledger.layout().slots[index].checking = 1;
  ledger.layout().slots[index].min_bytes = ~std::uint64_t{0};
  ledger.layout().slots[index].pledged_bytes = ~std::uint64_t{0};
  auto a = ledger.join(64 * kPage);
  CHECK(a && a->grant(99, kPage) == 64 && is_sound(ledger));
}

TEST(account_integrity_check_detects_wrong_sums) {
  Ledger ledger;
  auto a = ledger.join(10 * kPage);
  REQUIRE(a && a->grant(60, kPage) == 60);
  CHECK(is_sound(ledger));
  LedgerSlot& slot = ledger.layout().slots[0];
  slot.reserved_bytes = slot.pledged_bytes = 5 * kPage;
  CHECK(!is_sound(ledger));
  CHECK(a->check_integrity(60, kPage).error().code == Errc::kIntegrity);
  slot.reserved_bytes = 0;
  CHECK(is_sound(ledger));  // pledged only: others are asked to give
  slot.pledged_bytes = 55 * kPage;
  CHECK(!is_sound(ledger));  // with the guarantee too much
  slot.pledged_bytes = 0;
  slot.reserved_bytes = 1;
  CHECK(!is_sound(ledger));
}

TEST(account_stays_consistent_under_concurrent_members) {
  Ledger ledger;
  constexpr int kMembers = 4;
  std::vector<std::unique_ptr<LedgerMember>> members;
  for (int i = 0; i < kMembers; ++i) members.push_back(ledger.join());
  std::atomic<bool> stop{false};
  std::atomic<int> woken{0}, refused{0}, reserved{0};
  // A wake is refused only because of what others have: threads that ran one after another go on.
  const auto all_happened = [&] { return woken > 0 && refused > 0 && reserved > 0; };
  const auto now = std::chrono::steady_clock::now;
  const auto deadline = now() + kSoon;
  std::vector<std::thread> threads;
  for (int i = 0; i < kMembers; ++i) {
    threads.emplace_back([&, i] {
      LedgerMember& member = *members[static_cast<std::size_t>(i)];
      std::mt19937 pick(static_cast<unsigned>(i));
      const auto some = [&](std::uint64_t most) { return pick() % (most + 1); };
      std::uint64_t held = 0;
      const auto give = [&](std::uint64_t pages) {
        member.give_back(pages, kPage);
        held -= pages;
        member.publish(0, held * kPage, 0, kPage, false);
      };
      for (int step = 0; step < 3000 || (!all_happened() && now() < deadline); ++step) {
        const bool slept = member.is_asleep();
        switch (some(5)) {
          case 0:
          case 1:
            if (!member.is_asleep()) held += member.grant(some(20), kPage);
            member.publish(0, held * kPage, 0, kPage, true);
            break;
          case 2:
            give(some(held));
            break;
          case 3:
            give(held);
            member.fall_asleep();
            break;
          case 4:
            if (member.is_asleep() && !member.claim_wake()) ++refused;
            break;
          default:
            (void)(some(1) == 0 ? member.set_min(some(30) * kPage)
                                : member.claim_reserve(some(30) * kPage));
        }
        if (member.claim_is_met()) {
          woken += slept && !member.is_asleep();
          reserved += member.reserve_bytes() > 0;
        } else if (some(9) == 0) {
          (void)member.fail_claim();
        }
        const std::uint64_t bytes = member.open_reclaim().bytes;
        give(std::min(held, (bytes + kPage - 1) / kPage));
        member.handled(bytes);
      }
      give(held);
    });
  }
  std::thread looker([&] {
    while (!stop) {
      const Status sound = LedgerView::open(ledger.bytes())->check_integrity();
      if (!CHECK(static_cast<bool>(sound))) std::printf("%s\n", sound.error().message.c_str());
    }
  });
  for (std::thread& thread : threads) thread.join();
  stop = true;
  looker.join();
  CHECK(all_happened());
  for (auto& member : members) member->fall_asleep();
  CHECK(is_sound(ledger) && members[0]->room(kPage) == kPages);
}

}  // namespace kvelastic
