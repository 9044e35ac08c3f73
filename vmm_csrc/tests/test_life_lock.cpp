// Locks that say that a process lives: what ends them, and what does not.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/life_lock.h"
#include "base/process.h"
#include "check.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kByte = 7;

/// A file of shared memory and an open of it by which nobody holds anything.
struct Shared {
  std::string path = "/dev/shm/.kvtest_life_" + std::to_string(::getpid());
  int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  ~Shared() {
    ::close(fd);
    ::unlink(path.c_str());
  }
  LifeFile file() const { return *LifeFile::of(path, fd); }
  Life ask(std::uint64_t first = kByte, std::uint64_t count = 1) const {
    return LifeJudge(fd).ask(first, count);
  }
  std::unique_ptr<LifeLock> hold(LifeLock::Children children = LifeLock::Children::kDrop,
                                 std::uint64_t byte = kByte) const {
    auto attempt = LifeLock::hold(file(), byte, children);
    if (!CHECK(attempt && attempt->outcome == LifeLock::Outcome::kHeld)) return nullptr;
    return std::move(attempt->lock);
  }
};

/// A process that does `work`, says so, and sleeps until it is killed.
struct Child {
  static inline int word = -1;  // in the child: by which it says so
  pid_t pid = 0;

  template <typename Work>
  explicit Child(Work work) {
    int said[2];
    CHECK(::pipe(said) == 0);
    pid = ::fork();
    if (pid == 0) {
      word = said[1];
      work();
      if (::write(said[1], "x", 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    char told = 0;
    CHECK(::read(said[0], &told, 1) == 1);
    ::close(said[0]);
    ::close(said[1]);
  }
  void kill() {
    if (pid == 0) return;
    CHECK(::kill(pid, SIGKILL) == 0 && ::waitpid(pid, nullptr, 0) == pid);
    pid = 0;
  }
  ~Child() { kill(); }
};

}  // namespace

TEST(liveness_lock_is_held_until_dropped) {
  const Shared shared;
  CHECK(shared.ask() == Life::kDead);
  auto held = shared.hold();
  CHECK(shared.ask() == Life::kAlive);
  CHECK(shared.ask(0, 128) == Life::kAlive);
  CHECK(shared.ask(kByte + 1, 120) == Life::kDead && shared.ask(0, kByte) == Life::kDead);
  auto again = LifeLock::hold(shared.file(), kByte, LifeLock::Children::kDrop);
  CHECK(again && again->outcome == LifeLock::Outcome::kTaken);
  CHECK(shared.ask() == Life::kAlive);
  held.reset();
  CHECK(shared.ask() == Life::kDead);
}

TEST(liveness_lock_survives_closing_all_descriptors) {
  const Shared shared;
  Child child([&] {
    (void)shared.hold().release();  // as a process has it until its end
    constexpr int kLowest = 3;
    for (int fd = kLowest; fd < static_cast<int>(::sysconf(_SC_OPEN_MAX)); ++fd) {
      if (fd != Child::word) ::close(fd);
    }
    ::close(::open(shared.path.c_str(), O_RDWR | O_CLOEXEC));  // frees locks of the older kind
  });
  CHECK(shared.ask() == Life::kAlive);
  child.kill();
  CHECK(shared.ask() == Life::kDead);
}

TEST(liveness_lock_of_a_killed_process_is_free) {
  const Shared shared;
  for (const bool threads : {false, true}) {
    Child child([&] {
      (void)shared.hold().release();
      if (threads)
        std::thread([] {
          for (;;) ::pause();
        }).detach();
    });
    CHECK(shared.ask() == Life::kAlive);
    CHECK(::kill(child.pid, SIGSTOP) == 0);
    CHECK(shared.ask() == Life::kAlive);
    child.kill();
    CHECK(shared.ask() == Life::kDead);
  }
}

TEST(liveness_lock_is_inherited_only_if_requested) {
  const Shared shared;
  for (const LifeLock::Children children : {LifeLock::Children::kKeep, LifeLock::Children::kDrop}) {
    auto held = shared.hold(children);
    Child child([&] {
      // Whatever the child does with what it has inherited: the lock is its parent's, and so is
      // the address, where it has a lock of its own now.
      auto own = shared.hold(LifeLock::Children::kDrop, kByte + 1);
      held.reset();
      if (!own || shared.ask(kByte + 1) != Life::kAlive) ::_exit(1);
      (void)own.release();
    });
    CHECK(shared.ask() == Life::kAlive);
    held.reset();
    CHECK(shared.ask() == (children == LifeLock::Children::kKeep ? Life::kAlive : Life::kDead));
    child.kill();
    CHECK(shared.ask() == Life::kDead);
  }
}

TEST(liveness_lock_does_not_survive_exec) {
  const Shared shared;
  for (const LifeLock::Children children : {LifeLock::Children::kKeep, LifeLock::Children::kDrop}) {
    int out[2];
    REQUIRE(::pipe2(out, O_CLOEXEC) == 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
      (void)shared.hold(children).release();
      ::dup2(out[1], 1);
      ::execlp("sh", "sh", "-c", "echo x; exec sleep 600", static_cast<char*>(nullptr));
      ::_exit(1);
    }
    char told = 0;
    CHECK(::read(out[0], &told, 1) == 1);
    CHECK(shared.ask() == Life::kDead);
    // Its number and start are as they were: it is seen to run, and called alive as long.
    const std::vector<ProcessStart> seen{
        {static_cast<std::uint32_t>(pid), process_start_ticks(pid).value_or(0)}};
    CHECK(LifeJudge(shared.fd).ask(kByte, 1, own_pid_namespace(), seen) == Life::kAlive);
    CHECK(LifeJudge(shared.fd).ask(kByte, 1, own_pid_namespace() + 1, seen) == Life::kDead);
    CHECK(LifeJudge(shared.fd).ask(kByte, 1, 0, seen) == Life::kDead);
    CHECK(::kill(pid, SIGKILL) == 0 && ::waitpid(pid, nullptr, 0) == pid);
    CHECK(LifeJudge(shared.fd).ask(kByte, 1, own_pid_namespace(), seen) == Life::kDead);
    ::close(out[0]);
    ::close(out[1]);
  }
}

TEST(liveness_query_is_not_mistaken_for_a_holder) {
  const Shared shared;
  const Child judge([&] { CHECK(shared.ask() == Life::kDead); });
  // Nor is a stranger with a read lock, which whoever may read the file can take.
  const Child stranger([&] {
    struct flock lock{};
    lock.l_type = F_RDLCK;
    CHECK(::fcntl(shared.fd, F_SETLK, &lock) == 0);
  });
  CHECK(shared.ask() == Life::kDead);
}

TEST(liveness_lock_refuses_a_different_file) {
  const Shared shared;
  LifeFile other = shared.file();
  ++other.inode;
  CHECK(LifeLock::hold(other, kByte, LifeLock::Children::kDrop).error().code == Errc::kSegment);
  other.path = "/dev/shm/.kvtest_none";
  CHECK(LifeLock::hold(other, kByte, LifeLock::Children::kDrop).error().code == Errc::kSegment);
  CHECK(LifeJudge(other).ask(kByte, 1) == Life::kUnknown);
  CHECK(LifeFile::of("x", -1).error().code == Errc::kSegment);
}

TEST(liveness_is_unknown_on_other_file_systems) {
  const int fd = ::open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  CHECK(LifeJudge(fd).ask(kByte, 1) == Life::kUnknown);
  ::close(fd);
}

TEST(three_hundred_liveness_locks_can_be_held) {
  const Shared shared;
  std::vector<std::unique_ptr<LifeLock>> all;
  constexpr std::uint64_t kMany = 300;
  for (std::uint64_t i = 0; i < kMany; ++i) {
    all.push_back(shared.hold(LifeLock::Children::kDrop, i));
  }
  for (std::uint64_t i = 0; i < kMany; ++i) CHECK(shared.ask(i) == Life::kAlive);
  all.clear();
  CHECK(shared.ask(0, kMany) == Life::kDead);
}

}  // namespace kvelastic
