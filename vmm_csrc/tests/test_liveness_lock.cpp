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

#include "base/liveness_lock.h"
#include "base/process.h"
#include "check.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kByte = 7;

/// A file of shared memory and an open of it by which nobody holds anything.
struct Shared {
  std::string path = "/dev/shm/.kvtest_liveness_" + std::to_string(::getpid());
  int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  ~Shared() {
    ::close(fd);
    ::unlink(path.c_str());
  }
  LivenessFile file() const { return *LivenessFile::of(path, fd); }
  Liveness query(std::uint64_t first = kByte, std::uint64_t count = 1) const {
    return LivenessCheck(fd).query(first, count);
  }
  std::unique_ptr<LivenessLock> hold(
      LivenessLock::Children children = LivenessLock::Children::kDrop,
      std::uint64_t byte = kByte) const {
    auto attempt = LivenessLock::hold(file(), byte, children);
    if (!CHECK(attempt && attempt->outcome == LivenessLock::Outcome::kHeld)) return nullptr;
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
  CHECK(shared.query() == Liveness::kDead);
  auto held = shared.hold();
  CHECK(shared.query() == Liveness::kAlive);
  CHECK(shared.query(0, 128) == Liveness::kAlive);
  CHECK(shared.query(kByte + 1, 120) == Liveness::kDead &&
        shared.query(0, kByte) == Liveness::kDead);
  auto again = LivenessLock::hold(shared.file(), kByte, LivenessLock::Children::kDrop);
  CHECK(again && again->outcome == LivenessLock::Outcome::kTaken);
  CHECK(shared.query() == Liveness::kAlive);
  held.reset();
  CHECK(shared.query() == Liveness::kDead);
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
  CHECK(shared.query() == Liveness::kAlive);
  child.kill();
  CHECK(shared.query() == Liveness::kDead);
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
    CHECK(shared.query() == Liveness::kAlive);
    CHECK(::kill(child.pid, SIGSTOP) == 0);
    CHECK(shared.query() == Liveness::kAlive);
    child.kill();
    CHECK(shared.query() == Liveness::kDead);
  }
}

TEST(liveness_lock_is_inherited_only_if_requested) {
  const Shared shared;
  for (const LivenessLock::Children children :
       {LivenessLock::Children::kKeep, LivenessLock::Children::kDrop}) {
    auto held = shared.hold(children);
    Child child([&] {
      // Whatever the child does with what it has inherited: the lock is its parent's, and so is
      // the address, where it has a lock of its own now.
      auto own = shared.hold(LivenessLock::Children::kDrop, kByte + 1);
      held.reset();
      if (!own || shared.query(kByte + 1) != Liveness::kAlive) ::_exit(1);
      (void)own.release();
    });
    CHECK(shared.query() == Liveness::kAlive);
    held.reset();
    CHECK(shared.query() ==
          (children == LivenessLock::Children::kKeep ? Liveness::kAlive : Liveness::kDead));
    child.kill();
    CHECK(shared.query() == Liveness::kDead);
  }
}

TEST(liveness_lock_does_not_survive_exec) {
  const Shared shared;
  for (const LivenessLock::Children children :
       {LivenessLock::Children::kKeep, LivenessLock::Children::kDrop}) {
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
    CHECK(shared.query() == Liveness::kDead);
    // Its number and start are as they were: it is seen to run, and called alive as long.
    const std::vector<ProcessStart> seen{
        {static_cast<std::uint32_t>(pid), process_start_ticks(pid).value_or(0)}};
    CHECK(LivenessCheck(shared.fd).query(kByte, 1, own_pid_namespace(), seen) == Liveness::kAlive);
    CHECK(LivenessCheck(shared.fd).query(kByte, 1, own_pid_namespace() + 1, seen) ==
          Liveness::kDead);
    CHECK(LivenessCheck(shared.fd).query(kByte, 1, 0, seen) == Liveness::kDead);
    CHECK(::kill(pid, SIGKILL) == 0 && ::waitpid(pid, nullptr, 0) == pid);
    CHECK(LivenessCheck(shared.fd).query(kByte, 1, own_pid_namespace(), seen) == Liveness::kDead);
    ::close(out[0]);
    ::close(out[1]);
  }
}

TEST(liveness_query_is_not_mistaken_for_a_holder) {
  const Shared shared;
  const Child judge([&] { CHECK(shared.query() == Liveness::kDead); });
  // Nor is another program with a read lock, which whoever may read the file can take.
  const Child other_program([&] {
    struct flock lock{};
    lock.l_type = F_RDLCK;
    CHECK(::fcntl(shared.fd, F_SETLK, &lock) == 0);
  });
  CHECK(shared.query() == Liveness::kDead);
}

TEST(liveness_lock_refuses_a_different_file) {
  const Shared shared;
  LivenessFile other = shared.file();
  ++other.inode;
  CHECK(LivenessLock::hold(other, kByte, LivenessLock::Children::kDrop).error().code ==
        Errc::kSegment);
  other.path = "/dev/shm/.kvtest_none";
  CHECK(LivenessLock::hold(other, kByte, LivenessLock::Children::kDrop).error().code ==
        Errc::kSegment);
  CHECK(LivenessCheck(other).query(kByte, 1) == Liveness::kUnknown);
  CHECK(LivenessFile::of("x", -1).error().code == Errc::kSegment);
}

TEST(liveness_is_unknown_on_other_file_systems) {
  const int fd = ::open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  CHECK(LivenessCheck(fd).query(kByte, 1) == Liveness::kUnknown);
  ::close(fd);
}

TEST(three_hundred_liveness_locks_can_be_held) {
  const Shared shared;
  std::vector<std::unique_ptr<LivenessLock>> all;
  constexpr std::uint64_t kMany = 300;
  for (std::uint64_t i = 0; i < kMany; ++i) {
    all.push_back(shared.hold(LivenessLock::Children::kDrop, i));
  }
  for (std::uint64_t i = 0; i < kMany; ++i) CHECK(shared.query(i) == Liveness::kAlive);
  all.clear();
  CHECK(shared.query(0, kMany) == Liveness::kDead);
}

}  // namespace kvelastic
