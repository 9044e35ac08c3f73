// Liveness locks: a process that may hold memory locks one byte of a shared file, so the kernel
// knows whether the process is alive.
//
//   holder   opens the file, write-locks the byte, maps the file PROT_NONE, closes the descriptor.
//            From then on only the mapping keeps the lock.
//   check    opens the file for reading and asks the kernel whether the byte is locked. It never
//            locks the byte: a stopped process would look like a live holder.
//
// An open-file-description lock ends with the last user of that open file. A mapping survives
// close_range() and os.closerange(). It is not inherited through exec, and it leaves no descriptor
// through which a child could unlock the byte.
//
// The mapping lies at a low address because the kernel unmaps a dying process from the top down.
// The lock is therefore released after the memory. (With a descriptor instead of a mapping, the
// lock was released up to 250 ms before 2 GiB of memory were.)
//
// Locks need no bytes in the file: their offsets lie far beyond its end. No code ever unlocks
// explicitly.
//
// This works across pid, mount, time and user namespaces, for other users, and over a read-only
// bind mount. On a file system other than tmpfs the check returns kUnknown.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/own_process.h"
#include "base/status.h"

namespace kvelastic {

/// Whether a process that may hold memory is alive.
enum class Liveness : std::uint8_t {
  kAlive,
  kDead,
  kUnknown,  ///< cannot be determined here, so its memory must not be touched
};

/// A path and the file that it led to. Device and inode identify the file while it is open or
/// mapped; the path alone may lead to another file by now. An empty path means no file.
struct LivenessFile {
  std::string path;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;

  /// Describes an open file. Fails with kSegment if `fd` is not valid.
  static Result<LivenessFile> of(std::string path, int fd);
};

/// A pid and a start time, which together distinguish a process from a later one with the same pid.
struct ProcessStart {
  std::uint32_t pid = 0;
  std::uint64_t start_ticks = 0;
};

/// Holds one byte until it is destroyed or its process has ended. Any thread; never blocks.
class LivenessLock {
 public:
  /// What happens in a forked child. A child that still maps the memory must keep the lock, or the
  /// memory would be counted as free. A child that does not map it must drop the lock.
  enum class Children : std::uint8_t { kKeep, kDrop };
  enum class Outcome : std::uint8_t {
    kHeld,
    kTaken,    ///< another open file holds the byte
    kNoLocks,  ///< this file system has no such locks; checks detect that too
  };
  struct Attempt {
    Outcome outcome;
    std::unique_ptr<LivenessLock> lock;  ///< kHeld only
  };

  /// Locks byte number `byte` of the file. Fails with kSegment if the path now leads to another
  /// file or the system refuses (no descriptor, no memory).
  static Result<Attempt> hold(const LivenessFile& file, std::uint64_t byte, Children children);

  /// The byte stays locked until the process has ended.
  void keep() { is_kept_ = true; }

  /// Frees the byte, unless it is kept. In a forked child it does nothing.
  ~LivenessLock();
  LivenessLock(const LivenessLock&) = delete;
  LivenessLock& operator=(const LivenessLock&) = delete;

 private:
  explicit LivenessLock(void* mapping) : mapping_(mapping) {}

  void* const mapping_;
  const OwnProcess held_by_;
  bool is_kept_ = false;
};

/// Queries the locks of one file, at about 1 us per query. Any thread.
class LivenessCheck {
 public:
  /// `fd` stays the caller's and must be a separate open of the file: a lock is not visible through
  /// the open that holds it.
  explicit LivenessCheck(int fd);
  /// Opens the file. If that fails, or the path now leads to another file, every query returns
  /// kUnknown.
  explicit LivenessCheck(const LivenessFile& file);
  ~LivenessCheck();
  LivenessCheck(const LivenessCheck&) = delete;
  LivenessCheck& operator=(const LivenessCheck&) = delete;

  /// Returns kAlive if one of the `count` bytes from `first` on is locked.
  Liveness query(std::uint64_t first, std::uint64_t count) const;
  /// Also returns kAlive if one of `processes` belongs to this pid namespace and is visible in
  /// /proc with the given start time, even if its lock is not seen.
  Liveness query(std::uint64_t first, std::uint64_t count, std::uint64_t pid_namespace,
                 std::span<const ProcessStart> processes) const;

 private:
  const int owned_fd_ = -1;  // -1: the caller's
  const int fd_ = -1;        // -1: cannot query
};

}  // namespace kvelastic
