// The ledger: who may join, what is granted, what is asked; and many threads at it at once.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/process.h"
#include "base/size_text.h"
#include "check.h"
#include "ledger/ledger.h"
#include "ledger_fixture.h"

namespace kvelastic {

// ------------------------------------------------------------------------------------- its form

TEST(ledger_with_a_corrupt_header_is_refused) {
  Ledger ledger;
  REQUIRE(static_cast<bool>(LedgerView::open(ledger.bytes())));
  for (std::size_t at = 0; at < sizeof(LedgerHeader); ++at) {
    for (const unsigned flip : {1U, 128U, 255U}) {
      std::byte& byte = ledger.bytes()[at];
      byte ^= static_cast<std::byte>(flip);
      CHECK(LedgerView::open(ledger.bytes()).error().code == Errc::kSegmentFormat);
      CHECK(ledger.try_join(me()).error().code == Errc::kSegmentFormat);
      CHECK(ledger_reap(ledger.bytes(), LivenessCheck(ledger.file.fd)).error().code ==
            Errc::kSegmentFormat);
      byte ^= static_cast<std::byte>(flip);
    }
  }
  CHECK(static_cast<bool>(LedgerView::open(ledger.bytes())));
}

TEST(truncated_ledger_is_refused) {
  Ledger ledger;
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{11}, std::size_t{255},
                                 sizeof(LedgerHeader), kLedgerBytes - 1}) {
    const auto fewer = ledger.bytes().first(size);
    CHECK(LedgerView::open(fewer).error().code == Errc::kSegmentFormat);
    CHECK(ledger_create(fewer, {}).error().code == Errc::kInvalidArgument);
  }
  CHECK(ledger_version(ledger.bytes()) == kLedgerAbiVersion);
  CHECK(!ledger_version(ledger.bytes().first(11)));
}

TEST(ledger_refuses_overlong_names) {
  Ledger ledger;
  LedgerOrigin origin;
  origin.device = std::string(64, 'd');
  CHECK(static_cast<bool>(ledger_create(ledger.bytes(), origin)));
  origin.group = std::string(65, 'g');
  CHECK(ledger_create(ledger.bytes(), origin).error().code == Errc::kInvalidArgument);
  origin.group = std::string("a\0b", 3);
  CHECK(ledger_create(ledger.bytes(), origin).error().code == Errc::kInvalidArgument);
}

// ---------------------------------------------------------------------------------- membership

TEST(ledger_members_join_and_leave) {
  Ledger ledger;
  auto a = ledger.join(3 * kPage, -4);
  auto b = ledger.join(0, 9);
  REQUIRE(a && b);
  CHECK(ledger.members().size() == 2);
  CHECK(ledger.members()[0].facts.min_bytes == 3 * kPage);
  CHECK(ledger.members()[0].facts.priority == -4 && ledger.members()[1].facts.priority == 9);
  CHECK(a->grant(5, kPage) == 5);
  a->publish(1, 2, 3, kPage, true);
  CHECK(b->request_memory(60 * kPage));
  a->set_limit(7);
  a->leave();
  a->leave();
  CHECK(ledger.members().size() == 1 && ledger.members()[0].slot == 1);
  CHECK(b->room(kPage) == kPages);

  // The next one in its slot starts with nothing of it.
  auto c = ledger.join();
  REQUIRE(c);
  const LedgerEntry fresh = ledger.members()[0];
  CHECK(fresh.slot == 0 && fresh.limit_bytes == 0 && fresh.in_use_bytes == 0);
  CHECK(fresh.facts.granted_bytes == 0 && fresh.facts.min_bytes == 0 && fresh.facts.priority == 0);
  CHECK(fresh.facts.cached_bytes == 0 && fresh.facts.parked_bytes == 0);
  CHECK(fresh.facts.reclaim_bytes == 0 && fresh.facts.request_bytes == 0);
  CHECK(c->open_reclaim().bytes == 0 && c->open_reclaim().depth == Depth::kParked);
}

/// Whoever has left has no hand in the slot any more: another process may have it.
TEST(ledger_member_that_left_changes_nothing) {
  Ledger ledger;
  auto gone = ledger.join();
  REQUIRE(gone && gone->grant(3, kPage) == 3);
  gone->leave();
  auto next = ledger.join(kPage, 5);
  REQUIRE(next && next->grant(2, kPage) == 2);
  next->publish(11, 12, 13, kPage, false);
  CHECK(gone->grant(1, kPage) == 0 && gone->granted_bytes() == 0);
  gone->give_back(1, kPage);
  gone->publish(1, 2, 3, 4, true);
  (void)gone->set_priority(-1);
  gone->set_limit(99);
  (void)gone->set_min(7 * kPage);
  gone->handled(1 << 30);
  CHECK(!gone->request_memory(kPage));
  gone->end_memory_request();
  CHECK(static_cast<bool>(gone->add_worker(1, 1)));
  const LedgerEntry entry = ledger.members().at(0);
  CHECK(entry.facts.granted_bytes == 2 * kPage && entry.facts.min_bytes == kPage);
  CHECK(entry.facts.priority == 5 && entry.limit_bytes == 0 && entry.in_use_bytes == 11);
  CHECK(entry.facts.cached_bytes == 12 && entry.facts.parked_bytes == 13);
  CHECK(entry.page_bytes == kPage && entry.facts.request_bytes == 0);
  CHECK(entry.workers.empty());
  for (const SharedWord& bytes : ledger.layout().slots[0].handled_bytes) CHECK(bytes == 0);
  CHECK(static_cast<bool>(next->check_integrity(2, kPage)));
}

TEST(ledger_has_128_member_slots) {
  Ledger ledger(kLedgerSlots * kPage);
  std::vector<std::unique_ptr<LedgerMember>> all;
  for (std::size_t i = 0; i < kLedgerSlots; ++i) {
    all.push_back(ledger.join());
    REQUIRE(all.back() && all.back()->grant(2, kPage) == (i < kLedgerSlots / 2 ? 2 : 0));
  }
  CHECK(ledger.try_join(me()).error().code == Errc::kPoolExhausted);
  CHECK(ledger.members().size() == kLedgerSlots);
  all[17].reset();
  auto again = ledger.join();
  CHECK(again && again->room(kPage) == 2);
  CHECK(ledger.try_join(me()).error().code == Errc::kPoolExhausted);
}

TEST(ledger_reaps_only_dead_members) {
  Ledger ledger;
  auto alive = ledger.join(kPage);
  REQUIRE(alive && alive->grant(8, kPage) == 8);
  const LedgerIdentity nobody = a_dead_one();
  LedgerIdentity later_one_of_my_pid = me(), elsewhere = nobody, seen = me();
  ++later_one_of_my_pid.start_ticks;
  elsewhere.pid_namespace = own_pid_namespace() + 1;
  CHECK(ledger.one_that_died(nobody, 8) == 1);
  CHECK(ledger.one_that_died(later_one_of_my_pid, 8) == 2);
  CHECK(ledger.one_that_died(elsewhere, 8) == 3);
  CHECK(ledger.one_that_died(seen, 8) == 4);
  const std::size_t survived = ledger.one_that_died(nobody, 8);
  const std::uint64_t incarnation = ledger.layout().slots[survived].incarnation.load();

  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t worker = ::fork();
  if (worker == 0) {
    auto held = LivenessLock::hold(*LivenessFile::of(ledger.file.path, ledger.file.fd),
                                   ledger_liveness_byte(survived, incarnation, 1 + 63),
                                   LivenessLock::Children::kDrop);
    if (!held || ::write(ready[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char told = 0;
  REQUIRE(::read(ready[0], &told, 1) == 1);
  ::close(ready[0]);
  ::close(ready[1]);

  CHECK(alive->room(kPage) == kPages - 48);
  CHECK(ledger.reap() == 3);
  CHECK(alive->room(kPage) == kPages - 24);
  std::vector<std::size_t> left;
  for (const LedgerEntry& entry : ledger.members()) {
    left.push_back(entry.slot);
    CHECK(entry.alive == Liveness::kAlive);
  }
  CHECK(left == std::vector<std::size_t>{0, 4, 5});
  CHECK(ledger.reap() == 0);
  CHECK(::kill(worker, SIGKILL) == 0 && ::waitpid(worker, nullptr, 0) == worker);
  CHECK(ledger.reap() == 1);
}

TEST(ledger_keeps_members_of_unknown_liveness) {
  Ledger ledger;
  ledger.one_that_died(a_dead_one(), 8);
  const SharedFile another;
  for (const int fd : {-1, 1 << 20}) {
    CHECK(*ledger_reap(ledger.bytes(), LivenessCheck(fd)) == 0);
  }
  const LivenessFile mine = *LivenessFile::of(ledger.file.path, ledger.file.fd);
  for (const LivenessFile& file : {LivenessFile{}, LivenessFile{"/dev/shm/.kvtest_none", 1, 2},
                                   LivenessFile{another.path, mine.device, mine.inode},
                                   *LivenessFile::of(ledger.file.path, another.fd)}) {
    const LivenessCheck liveness(file);
    CHECK(*ledger_reap(ledger.bytes(), liveness) == 0);
    CHECK(LedgerView::open(ledger.bytes())->members(liveness).at(0).alive == Liveness::kUnknown);
  }
  CHECK(*ledger_reap(ledger.bytes(), LivenessCheck(mine)) == 1);
}

TEST(ledger_reused_slot_ignores_its_former_workers) {
  Ledger ledger;
  auto first = ledger.join();
  REQUIRE(static_cast<bool>(first));
  const std::uint64_t incarnation = ledger.layout().slots[0].incarnation.load();
  const LivenessFile file = *LivenessFile::of(ledger.file.path, ledger.file.fd);
  auto worker = LivenessLock::hold(file, ledger_liveness_byte(0, incarnation, 1),
                                   LivenessLock::Children::kDrop);
  REQUIRE(worker && worker->outcome == LivenessLock::Outcome::kHeld);
  first->leave();
  CHECK(ledger.one_that_died(a_dead_one(), 4) == 0);
  CHECK(ledger.reap() == 1);
}

TEST(ledger_join_skips_slots_of_stopped_joiners) {
  Ledger ledger;
  const LivenessFile file = *LivenessFile::of(ledger.file.path, ledger.file.fd);
  // One that was stopped in the middle of joining.
  auto stopped =
      LivenessLock::hold(file, ledger_liveness_byte(0, 1, 0), LivenessLock::Children::kDrop);
  REQUIRE(stopped && stopped->outcome == LivenessLock::Outcome::kHeld);
  auto next = ledger.join();
  CHECK(next && ledger.members().at(0).slot == 1);
  stopped->lock.reset();
  auto later = ledger.join();
  CHECK(later && ledger.members().at(0).slot == 0);
}

TEST(ledger_stays_shut_after_the_last_member) {
  Ledger ledger;
  auto member = ledger.join();
  CHECK(!*ledger_shut(ledger.bytes()));
  member->leave();
  CHECK(*ledger_shut(ledger.bytes()) && *ledger_shut(ledger.bytes()));
  auto refused = ledger.try_join(me());
  CHECK(refused && *refused == nullptr);
  CHECK(ledger.members().empty());
}

TEST(ledger_keeps_the_first_decided_page_size) {
  Ledger ledger;
  CHECK(*ledger_decide_page_bytes(ledger.bytes(), 32 * kMiB) == 32 * kMiB);
  CHECK(*ledger_decide_page_bytes(ledger.bytes(), 128 * kMiB) == 32 * kMiB);
  ledger.bytes()[0] ^= std::byte{1};
  CHECK(ledger_decide_page_bytes(ledger.bytes(), kMiB).error().code == Errc::kSegmentFormat);
}

TEST(ledger_decides_one_page_size_under_concurrency) {
  Ledger ledger;
  std::barrier start(4);
  std::array<std::uint64_t, 4> decided{};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < decided.size(); ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      decided[i] = *ledger_decide_page_bytes(ledger.bytes(), (i + 1) * kPage);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(std::ranges::count(decided, decided[0]) == 4);
}

TEST(ledger_refuses_a_forked_child) {
  Ledger ledger;
  auto member = ledger.join(kPage);
  REQUIRE(member && member->grant(2, kPage) == 2);
  const pid_t child = ::fork();
  if (child == 0) {
    const Errc refused = Errc::kDeviceUnavailable;
    bool all = member->grant(1, kPage) == 0 && !member->request_memory(kPage) &&
               member->granted_bytes() == 0;
    all &= member->set_min(0).error().code == refused;
    all &= member->add_worker(1, 1).error().code == refused;
    member->give_back(1, kPage);
    member->set_others(kPage);
    (void)member->set_priority(9);
    member->leave();
    member.reset();
    ::_exit(all ? 0 : 1);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  CHECK(member->granted_bytes() == 2 * kPage && member->priority() == 0);
  CHECK(member->min_bytes() == kPage && member->room(kPage) == kPages - 2);
  CHECK(ledger.members().at(0).alive == Liveness::kAlive);
}

TEST(ledger_request_gets_memory_of_dead_members) {
  Ledger ledger;
  ledger.one_that_died(a_dead_one(), kPages);
  auto alive = ledger.join();
  REQUIRE(static_cast<bool>(alive));
  CHECK(alive->grant(1, kPage) == 0);
  CHECK(alive->request_memory(kPage));
  CHECK(alive->grant(kPages, kPage) == kPages);
}

// ---------------------------------------------------------------------------------- guarantees

TEST(ledger_refuses_guarantees_above_the_device_capacity) {
  Ledger ledger;
  auto a = ledger.join(40 * kPage);
  REQUIRE(a);
  auto refused = ledger.try_join(me(), 25 * kPage);
  CHECK(!refused && refused.error().code == Errc::kGuarantee);
  CHECK(refused.error().message.find(size_text(25 * kPage)) != std::string::npos);
  CHECK(refused.error().message.find(size_text(40 * kPage)) != std::string::npos);
  CHECK(refused.error().message.find(size_text(64 * kPage)) != std::string::npos);
  CHECK(ledger.members().size() == 1);
  auto b = ledger.join(24 * kPage);
  REQUIRE(b);
  CHECK(a->set_min(40 * kPage + 1).error().code == Errc::kGuarantee);
  CHECK(a->min_bytes() == 40 * kPage);
  CHECK(a->set_min(~std::uint64_t{0}).error().code == Errc::kGuarantee);
  CHECK(static_cast<bool>(a->set_min(30 * kPage)));
  CHECK(static_cast<bool>(b->set_min(34 * kPage)));
  CHECK(!b->set_min(34 * kPage + 1));
  a->leave();
  CHECK(static_cast<bool>(b->set_min(64 * kPage)));
}

TEST(ledger_ignores_guarantees_of_dead_members) {
  Ledger ledger;
  ledger.one_that_died(a_dead_one(), 0, 60 * kPage);
  auto alive = ledger.join();
  REQUIRE(static_cast<bool>(alive));
  CHECK(static_cast<bool>(alive->set_min(64 * kPage)));
}

TEST(ledger_concurrent_guarantees_never_exceed_the_capacity) {
  Ledger ledger;
  std::array<std::unique_ptr<LedgerMember>, 3> all{ledger.join(), ledger.join(), ledger.join()};
  std::barrier start(4);
  std::vector<std::thread> threads;
  constexpr int kRounds = 100;
  for (auto& member : all) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        start.arrive_and_wait();
        (void)member->set_min(30 * kPage);
        start.arrive_and_wait();
        (void)member->set_min(0);
      }
    });
  }
  for (int round = 0; round < kRounds; ++round) {
    start.arrive_and_wait();
    start.arrive_and_wait();  // looked at below while they may be lowered: never too much
    std::uint64_t sum = 0;
    for (auto& member : all) sum += member->min_bytes();
    CHECK(sum <= kPages * kPage);
  }
  for (std::thread& thread : threads) thread.join();
}

// --------------------------------------------------------------------------------------- grants

TEST(ledger_grants_the_available_pages) {
  Ledger ledger;
  auto a = ledger.join();
  auto b = ledger.join();
  REQUIRE(a && b);
  CHECK(a->room(kPage) == kPages);
  CHECK(a->grant(0, kPage) == 0);
  CHECK(a->grant(60, kPage) == 60 && a->granted_bytes() == 60 * kPage);
  CHECK(b->grant(10, kPage) == 4 && b->granted_bytes() == 4 * kPage);
  CHECK(b->grant(1, kPage) == 0 && b->room(kPage) == 0);
  a->give_back(2, kPage);
  CHECK(b->room(kPage) == 2 && b->grant(~std::uint64_t{0}, kPage) == 2);
  CHECK(static_cast<bool>(a->check_integrity(58, kPage)));
  CHECK(a->check_integrity(57, kPage).error().code == Errc::kIntegrity);
  CHECK(static_cast<bool>(b->check_integrity(6, kPage)));
}

TEST(ledger_grants_in_whole_units) {
  Ledger ledger(10 * kGrantUnitBytes + kGrantUnitBytes / 2);
  auto a = ledger.join();
  REQUIRE(a);
  CHECK(a->room(1) == 10 && a->room(kGrantUnitBytes) == 10);
  // A byte more than two units takes three.
  CHECK(a->room(2 * kGrantUnitBytes + 1) == 3);
  CHECK(a->grant(9, 2 * kGrantUnitBytes + 1) == 3);
  CHECK(a->granted_bytes() == 9 * kGrantUnitBytes);
  CHECK(a->grant(9, kGrantUnitBytes) == 1 && a->room(1) == 0);
  a->give_back(3, 2 * kGrantUnitBytes + 1);
  CHECK(a->granted_bytes() == kGrantUnitBytes);
}

TEST(ledger_grants_no_memory_held_by_other_processes) {
  Ledger ledger;
  auto a = ledger.join();
  REQUIRE(a);
  a->set_others(60 * kPage);
  CHECK(a->room(kPage) == 4 && a->grant(9, kPage) == 4);
  a->set_others(99 * kPage);
  CHECK(a->room(kPage) == 0 && a->grant(1, kPage) == 0);
  a->set_others(0);
  CHECK(a->grant(99, kPage) == 60);
  CHECK(a->see_device(a->moment(), 70 * kPage, 3 * kPage) == Sight::kBounded);
  CHECK(ledger.layout().others_bytes == 3 * kPage);
}

/// Its owner was stopped, or killed, between two steps: it has what it claimed, and no more.
TEST(ledger_stalled_claim_does_not_block_others) {
  for (const std::size_t stopped : {std::size_t{0}, std::size_t{1}}) {
    Ledger ledger;
    std::array<std::unique_ptr<LedgerMember>, 2> all{ledger.join(), ledger.join()};
    REQUIRE(all[0] && all[1]);
    constexpr std::uint64_t kClaimed = 24 * kPage / kGrantUnitBytes;
    ledger.layout().slots[stopped].units = kClaimed;
    LedgerMember& other = *all[1 - stopped];
    CHECK(other.room(kPage) == 40);
    CHECK(other.grant(30, kPage) == 30);
    CHECK(other.grant(64, kPage) == 10);
    CHECK(other.grant(1, kPage) == 0);
    all[stopped]->leave();
    CHECK(other.grant(64, kPage) == 24);
  }
}

TEST(ledger_concurrent_grants_never_exceed_the_capacity) {
  constexpr std::uint64_t kFew = 24;
  constexpr int kMembers = 4, kThreadsEach = 2, kSteps = 1500;
  Ledger ledger(kFew * kPage);
  std::vector<std::shared_ptr<LedgerMember>> members;
  for (int i = 0; i < kMembers; ++i) members.push_back(ledger.join());
  std::atomic<std::uint64_t> held{0}, most{0};
  std::array<std::atomic<std::uint64_t>, kMembers> got{};
  std::vector<std::thread> threads;
  for (int i = 0; i < kMembers * kThreadsEach; ++i) {
    threads.emplace_back([&, i] {
      LedgerMember& member = *members[static_cast<std::size_t>(i % kMembers)];
      std::mt19937 dice(static_cast<unsigned>(i));
      std::uint64_t mine = 0;
      for (int step = 0; step < kSteps; ++step) {
        const std::uint64_t taken = member.grant(1 + dice() % 9, kPage);
        mine += taken;
        got[static_cast<std::size_t>(i % kMembers)] += taken;
        const std::uint64_t now = held.fetch_add(taken) + taken;
        CHECK(now <= kFew);
        std::uint64_t before = most.load();
        while (before < now && !most.compare_exchange_weak(before, now)) {
        }
        if (dice() % 8 == 0) std::this_thread::yield();
        const std::uint64_t back = dice() % (mine + 1);
        held.fetch_sub(back);
        member.give_back(back, kPage);
        mine -= back;
      }
      held.fetch_sub(mine);
      member.give_back(mine, kPage);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(most == kFew);  // it was full at times: else nothing was at stake
  for (auto& count : got) CHECK(count > 0);
  for (auto& member : members) CHECK(static_cast<bool>(member->check_integrity(0, kPage)));
  CHECK(members[0]->grant(kFew + 1, kPage) == kFew);
}

TEST(ledger_grants_the_last_page_to_one_member) {
  constexpr int kMembers = 4, kRounds = 200;
  Ledger ledger(kPage);
  std::vector<std::shared_ptr<LedgerMember>> members;
  for (int i = 0; i < kMembers; ++i) members.push_back(ledger.join());
  std::barrier turn(kMembers);
  std::atomic<std::uint64_t> winners{0};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kMembers; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) {
        turn.arrive_and_wait();
        const std::uint64_t got = members[static_cast<std::size_t>(i)]->grant(3, kPage);
        winners += got;
        turn.arrive_and_wait();
        if (i == 0 && winners.exchange(0) != 1) ++wrong;
        turn.arrive_and_wait();
        members[static_cast<std::size_t>(i)]->give_back(got, kPage);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

/// What a thread takes while another one leaves must not be the next member's.
TEST(ledger_leave_during_grants_leaks_no_units) {
  for (int round = 0; round < 60; ++round) {
    Ledger ledger;
    auto leaver = ledger.join();
    REQUIRE(leaver);
    std::atomic<bool> runs{false}, stop{false};
    std::thread taker([&] {
      while (!stop) {
        leaver->give_back(leaver->grant(3, kPage), kPage);
        runs = true;
      }
    });
    CHECK(soon([&] { return runs.load(); }));
    leaver->leave();
    auto next = ledger.join();
    for (int look = 0; look < 4; ++look) {
      CHECK(next && next->granted_bytes() == 0 && ledger.layout().slots[0].units == 0);
      std::this_thread::yield();
    }
    stop = true;
    taker.join();
    CHECK(ledger.layout().slots[0].units == 0);
  }
}

// ------------------------------------------------------------------------------- memory requests

TEST(ledger_keeps_free_memory_for_higher_ranked_requests) {
  Ledger ledger;
  auto low = ledger.join();
  auto high = ledger.join(0, 1);
  auto poor = ledger.join(2 * kPage, -1);
  REQUIRE(low && high && poor);
  CHECK(low->grant(50, kPage) == 50);
  (void)high->request_memory(20 * kPage);
  CHECK(low->room(kPage) == 0 && low->grant(1, kPage) == 0);
  CHECK(high->room(kPage) == 14);
  CHECK(poor->room(kPage) == 14);  // below its guarantee: before all others
  (void)poor->request_memory(2 * kPage);
  CHECK(high->room(kPage) == 12 && poor->room(kPage) == 14);
  CHECK(poor->grant(2, kPage) == 2);
  poor->end_memory_request();
  CHECK(high->grant(20, kPage) == 12);
  low->give_back(10, kPage);
  CHECK(low->room(kPage) == 0);
  high->end_memory_request();
  CHECK(low->room(kPage) == 10);
}

TEST(ledger_forgets_a_request_that_is_not_renewed) {
  Ledger ledger;
  ledger.rules.request_expiry_ns = 50'000'000;
  auto low = ledger.join();
  auto high = ledger.join(0, 1);
  REQUIRE(low && high);
  CHECK(soon([&] {
    (void)high->request_memory(kPages * kPage);
    return low->room(kPage) == 0;
  }));
  CHECK(soon(
      [&] { return low->room(kPage) == kPages && ledger.members()[1].facts.request_bytes == 0; }));
}

TEST(ledger_requests_from_next_member_after_patience) {
  Ledger ledger;
  ledger.rules.patience_ns = 20'000'000;
  auto first = ledger.join(0, -2);
  auto second = ledger.join(0, -1);
  auto requester = ledger.join();
  REQUIRE(first && second && requester);
  for (LedgerMember* member : {first.get(), second.get()}) {
    CHECK(member->grant(kPages / 2, kPage) == kPages / 2);
    member->publish(0, 10 * kPage, 22 * kPage, kPage, true);
  }
  const std::uint32_t rung = first->bell();
  CHECK(requester->request_memory(3 * kPage));
  CHECK(first->bell() != rung);
  CHECK(first->open_reclaim().bytes == 3 * kPage && first->open_reclaim().depth == Depth::kParked);
  CHECK(second->open_reclaim().bytes == 0);
  // It does not answer: after the patience the next one is asked, the first one not again.
  CHECK(soon(
      [&] { return requester->request_memory(3 * kPage) && second->open_reclaim().bytes > 0; }));
  CHECK(soon([&] {
    return requester->request_memory(3 * kPage) &&
           ledger.members()[2].facts.request_bytes == 3 * kPage;
  }));
  CHECK(second->open_reclaim().bytes == 3 * kPage && first->open_reclaim().bytes == 3 * kPage);
  // One of them gives, and that is all that was missing.
  const std::uint32_t heard = requester->bell();
  second->give_back(3, kPage);
  second->handled(3 * kPage);
  CHECK(requester->bell() != heard);
  CHECK(requester->request_memory(3 * kPage) && requester->room(kPage) == 3);
  CHECK(second->open_reclaim().bytes == 0);
  CHECK(first->room(kPage) == 0);  // kept for the requester, not for who gives
  CHECK(requester->grant(3, kPage) == 3);
  requester->end_memory_request();
}

TEST(ledger_reclaim_request_uses_the_shallowest_step) {
  Ledger ledger;
  auto victim = ledger.join(0, -1);
  auto requester = ledger.join();
  REQUIRE(victim && requester);
  CHECK(victim->grant(kPages, kPage) == kPages);
  victim->publish(40 * kPage, 20 * kPage, 4 * kPage, kPage, true);
  CHECK(requester->request_memory(30 * kPage));
  CHECK(victim->open_reclaim().bytes == 30 * kPage &&
        victim->open_reclaim().depth == Depth::kInUse);
  victim->handled(30 * kPage);
  CHECK(victim->open_reclaim().bytes == 0);
  CHECK(requester->request_memory(2 * kPage));
  CHECK(victim->open_reclaim().bytes == 2 * kPage &&
        victim->open_reclaim().depth == Depth::kParked);
}

TEST(ledger_reclaims_cache_of_idle_members_immediately) {
  Ledger ledger;
  auto worker = ledger.join();
  auto requester = ledger.join();
  REQUIRE(worker && requester);
  CHECK(worker->grant(kPages, kPage) == kPages);
  worker->report_busy(true);
  worker->publish(0, 24 * kPage, 0, kPage, true);
  CHECK(!requester->request_memory(kPages * kPage) && worker->open_reclaim().bytes == 0);
  const std::uint32_t heard = requester->bell();
  worker->report_busy(false);
  CHECK(requester->bell() != heard);
  CHECK(requester->request_memory(kPages * kPage) && worker->open_reclaim().bytes == 24 * kPage);
  worker->handled(24 * kPage);
  worker->report_busy(true);
  CHECK(!requester->request_memory(kPages * kPage) && worker->open_reclaim().bytes == 0);
  // Its slot is of one that has reported nothing.
  worker->leave();
  auto next = ledger.join();
  REQUIRE(next);
  CHECK(ledger.members().at(0).facts.reported == Reported::kNothing);
}

TEST(ledger_deep_reclaim_request_does_not_affect_others) {
  Ledger ledger;
  ledger.rules.idle_ns = 1;
  auto victim = ledger.join(0, -1);
  auto equal = ledger.join(0, -1);
  auto higher = ledger.join(0, 9);
  REQUIRE(victim && equal && higher);
  CHECK(victim->grant(kPages, kPage) == kPages);
  victim->publish(40 * kPage, 24 * kPage, 0, kPage, false);
  CHECK(
      soon([&] { return equal->request_memory(10 * kPage) && victim->open_reclaim().bytes > 0; }));
  CHECK(victim->open_reclaim().bytes == 10 * kPage &&
        victim->open_reclaim().depth == Depth::kCached);
  CHECK(higher->request_memory(40 * kPage));
  CHECK(victim->open_reclaim().bytes == 10 * kPage &&
        victim->open_reclaim().depth == Depth::kCached);
  victim->handled(10 * kPage);
  CHECK(victim->open_reclaim().depth == Depth::kInUse);
}

TEST(ledger_give_back_wakes_the_waiter) {
  Ledger ledger;
  auto giver = ledger.join();
  auto requester = ledger.join();
  REQUIRE(giver && requester);
  CHECK(giver->grant(kPages, kPage) == kPages);
  const std::uint32_t seen = requester->bell();
  (void)requester->request_memory(kPage);
  std::thread waiter([&] { requester->wait(seen, kForever); });
  giver->give_back(1, kPage);
  waiter.join();
  CHECK(requester->bell() != seen && requester->grant(1, kPage) == 1);
  // Nobody is woken for nothing.
  const std::uint32_t quiet = giver->bell();
  requester->give_back(1, kPage);
  CHECK(giver->bell() == quiet);
}

/// Equals share what can be shared; what other programs hold is not for them to share.
TEST(ledger_fair_share_excludes_memory_of_other_processes) {
  Ledger ledger;
  ledger.rules.fair_cached_ns = 1;
  auto rich = ledger.join();
  auto requester = ledger.join();
  REQUIRE(rich && requester);
  rich->set_others(kPages / 2 * kPage);
  CHECK(rich->grant(28, kPage) == 28 && requester->grant(4, kPage) == 4);
  rich->publish(0, 28 * kPage, 0, kPage, true);
  CHECK(soon([&] {
    rich->publish(0, 28 * kPage, 0, kPage, true);  // busy all the time
    (void)requester->request_memory(30 * kPage);
    return rich->open_reclaim().bytes > 0;
  }));
  CHECK(rich->open_reclaim().bytes == 12 * kPage);
}

TEST(ledger_facts_and_requests_from_many_threads) {
  Ledger ledger;
  constexpr int kMembers = 3;
  std::vector<std::shared_ptr<LedgerMember>> members;
  for (int i = 0; i < kMembers; ++i) members.push_back(ledger.join(0, i % 2));
  std::atomic<bool> stop{false};
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kMembers; ++i) {
    // An engine's thread, that takes and asks ...
    threads.emplace_back([&, i] {
      LedgerMember& member = *members[static_cast<std::size_t>(i)];
      for (int step = 0; step < 300; ++step) {
        const std::uint64_t got = member.grant(40, kPage);
        member.publish(0, got * kPage / 2, got * kPage / 2, kPage, true);
        if (got < 40) (void)member.request_memory((40 - got) * kPage);
        CHECK(member.room(kPage) <= kPages && member.reach(kPage) <= 2 * kPages);
        std::this_thread::yield();
        member.give_back(got, kPage);
        member.end_memory_request();
      }
    });
    // ... and of a maintenance thread that is asked.
    threads.emplace_back([&, i] {
      LedgerMember& member = *members[static_cast<std::size_t>(i)];
      std::uint32_t seen = member.bell();
      while (!stop) {
        const LedgerMember::OpenReclaim open = member.open_reclaim();
        if (open.bytes > 0) {
          member.handled(open.bytes);
          ++served;
        }
        member.wait(std::exchange(seen, member.bell()), std::chrono::milliseconds(1));
      }
    });
  }
  threads.emplace_back([&] {
    while (!stop) {
      for (const LedgerEntry& entry : ledger.members()) {
        CHECK(entry.facts.granted_bytes <= kPages * kPage);
      }
      CHECK(ledger.reap() == 0);
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < kMembers; ++i) threads[static_cast<std::size_t>(2 * i)].join();
  stop = true;
  for (std::size_t i = 0; i < threads.size(); ++i) {
    if (threads[i].joinable()) threads[i].join();
  }
  for (auto& member : members) {
    CHECK(static_cast<bool>(member->check_integrity(0, kPage)));
    member->handled(member->open_reclaim().bytes);
    CHECK(member->open_reclaim().bytes == 0);
  }
}

}  // namespace kvelastic
