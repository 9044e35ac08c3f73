// A ledger in a file of shared memory, and members of it that live and die.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/process.h"
#include "check.h"
#include "ledger/ledger.h"

namespace kvelastic {

inline constexpr std::uint64_t kMiB = 1 << 20;
inline constexpr std::uint64_t kPage = 2 * kMiB;
inline constexpr std::uint64_t kPages = 64;
/// A guard: only a fault reaches it, on a machine of any speed.
inline constexpr auto kSoon = std::chrono::minutes(5);

/// Nothing expires during a test, on a machine of any speed. A test shortens what it waits for.
/// It is longer than any machine has been up: a time of 0, never, taken for a time would be recent.
inline constexpr std::uint64_t kCenturyNs = std::uint64_t{100} * 365 * 86'400 * 1'000'000'000;
inline constexpr ReclaimRules kPatientRules{.idle_ns = kCenturyNs,
                                            .patience_ns = kCenturyNs,
                                            .fair_cached_ns = kCenturyNs,
                                            .fair_in_use_ns = kCenturyNs,
                                            .request_expiry_ns = kCenturyNs};

/// A file of shared memory, gone with its last user.
struct SharedFile {
  std::string path =
      "/dev/shm/.kvtest_" + std::to_string(::getpid()) + "_" + std::to_string(made.fetch_add(1));
  int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  std::byte* bytes = nullptr;
  const pid_t made_by = ::getpid();

  SharedFile() {
    CHECK(::ftruncate(fd, static_cast<off_t>(kLedgerBytes)) == 0);
    void* mapped = ::mmap(nullptr, kLedgerBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(mapped != MAP_FAILED);
    bytes = static_cast<std::byte*>(mapped);
  }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  ~SharedFile() {
    ::munmap(bytes, kLedgerBytes);
    ::close(fd);
    if (::getpid() == made_by) ::unlink(path.c_str());
  }

 private:
  static inline std::atomic<int> made{0};
};

struct Ledger {
  SharedFile file{};
  ReclaimRules rules = kPatientRules;  ///< of members that join from now on

  explicit Ledger(std::uint64_t capacity_bytes = kPages * kPage) {
    LedgerOrigin origin;
    origin.capacity_bytes = capacity_bytes;
    origin.device = "host";
    origin.group = "test";
    CHECK(static_cast<bool>(ledger_create(bytes(), origin)));
  }
  std::span<std::byte> bytes() { return {file.bytes, kLedgerBytes}; }
  LedgerLayout& layout() { return *reinterpret_cast<LedgerLayout*>(file.bytes); }
  std::vector<LedgerEntry> members() {
    auto view = LedgerView::open(bytes());
    return view ? view->members(LivenessCheck(file.fd)) : std::vector<LedgerEntry>{};
  }
  Result<std::unique_ptr<LedgerMember>> try_join(const LedgerIdentity& identity,
                                                 std::uint64_t min_bytes = 0,
                                                 std::int64_t priority = 0) {
    return LedgerMember::join(bytes(),
                              {.identity = identity,
                               .min_bytes = min_bytes,
                               .priority = priority,
                               .file = *LivenessFile::of(file.path, file.fd),
                               .rules = rules},
                              nullptr);
  }
  std::uint64_t reap() {
    auto freed = ledger_reap(bytes(), LivenessCheck(file.fd));
    return CHECK(static_cast<bool>(freed)) ? *freed : 0;
  }
  /// A member whose process has ended without a word; answers its slot.
  std::size_t one_that_died(const LedgerIdentity& identity, std::uint64_t pages,
                            std::uint64_t min_bytes = 0);
  std::unique_ptr<LedgerMember> join(std::uint64_t min_bytes = 0, std::int64_t priority = 0);
};

inline LedgerIdentity me() {
  LedgerIdentity identity;
  identity.pid = static_cast<std::uint32_t>(::getpid());
  identity.start_ticks = process_start_ticks(::getpid()).value_or(0);
  identity.pid_namespace = own_pid_namespace();
  return identity;
}

inline std::unique_ptr<LedgerMember> Ledger::join(std::uint64_t min_bytes, std::int64_t priority) {
  auto made = try_join(me(), min_bytes, priority);
  return CHECK(static_cast<bool>(made)) ? *std::move(made) : nullptr;
}

inline std::size_t Ledger::one_that_died(const LedgerIdentity& identity, std::uint64_t pages,
                                         std::uint64_t min_bytes) {
  const pid_t child = ::fork();
  if (child == 0) {
    auto member = try_join(identity, min_bytes);
    ::_exit(member && (*member)->grant(pages, kPage) == pages ? 0 : 1);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  return members().back().slot;
}

/// A process that is over.
inline LedgerIdentity a_dead_one() {
  LedgerIdentity identity = me();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  identity.pid = static_cast<std::uint32_t>(child);
  return identity;
}

template <typename Condition>
bool soon(Condition holds) {
  const auto deadline = std::chrono::steady_clock::now() + kSoon;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace kvelastic
