// Life is a fact of the kernel: a process that may hold memory has a lock on a byte of a shared
// file.
//
//   holder   its own open of the file -> write lock on the byte -> PROT_NONE mapping of the file ->
//            the descriptor is closed. The mapping is all that keeps the lock.
//   judge    opens the file for reading and asks who has the byte. It never takes the lock: a judge
//            that is stopped would look alive.
//
// An open-file-description lock goes when the last user of that open goes. Kept by a mapping it
// survives close_range() and os.closerange(), it is not inherited through exec, and no descriptor
// is there by which a child could unlock it. The mapping lies at a low address because the kernel
// takes a dying process apart from the top: what is lowest goes last, so when the lock is free the
// memory is too. (Kept by a descriptor, the lock was free up to a quarter of a second before 2 GiB
// of memory were.)
//
// Locks need no bytes: their offsets lie far behind the end of the file. Nobody ever unlocks.
//
// It works across pid, mount, time and user namespaces, for other users and over a read-only bind
// mount. Where it does not (a file system other than tmpfs), nothing is concluded.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/own_process.h"
#include "base/status.h"

namespace kvelastic {

/// What can be said of a process that may hold memory.
enum class Life : std::uint8_t {
  kAlive,
  kDead,
  kUnknown,  ///< it cannot be asked here, so nothing may be done to what it has
};

/// A path, and the file that it led to. Both together name a file for as long as that is open or
/// mapped: a path alone may lead to another file by now. An empty path: there is no file.
struct LifeFile {
  std::string path;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;

  /// Of an open file. kSegment: the descriptor is none.
  static Result<LifeFile> of(std::string path, int fd);
};

/// A number and a start time: what tells a process from a later one of its number.
struct ProcessStart {
  std::uint32_t pid = 0;
  std::uint64_t start_ticks = 0;
};

/// Holds one byte until it is destroyed or its process is gone. Any thread; nothing blocks.
class LifeLock {
 public:
  /// What a fork does. A child that still maps the memory must keep the lock, or the memory would
  /// be taken for free; one that does not must not keep it.
  enum class Children : std::uint8_t { kKeep, kDrop };
  enum class Outcome : std::uint8_t {
    kHeld,
    kTaken,    ///< another open holds the byte
    kNoLocks,  ///< this file system has no such locks; judges know that too
  };
  struct Attempt {
    Outcome outcome;
    std::unique_ptr<LifeLock> lock;  ///< kHeld only
  };

  /// Takes byte number `byte` of the file. kSegment: the path leads to another file by now, or the
  /// system refuses (no descriptor, no memory).
  static Result<Attempt> hold(const LifeFile& file, std::uint64_t byte, Children children);

  /// Frees the byte; in a forked child it does nothing at all.
  ~LifeLock();
  LifeLock(const LifeLock&) = delete;
  LifeLock& operator=(const LifeLock&) = delete;

 private:
  explicit LifeLock(void* mapping) : mapping_(mapping) {}

  void* const mapping_;
  const OwnProcess held_by_;
};

/// Asks about the bytes of one open file. Costs a microsecond a question. Any thread.
class LifeJudge {
 public:
  /// `fd` is an open of the judge's own and stays the caller's; through the open that holds a lock
  /// that lock is not seen.
  explicit LifeJudge(int fd);
  /// Opens the file; knows nothing where that is not possible, or the path leads to another file.
  explicit LifeJudge(const LifeFile& file);
  ~LifeJudge();
  LifeJudge(const LifeJudge&) = delete;
  LifeJudge& operator=(const LifeJudge&) = delete;

  /// Whether one of `count` bytes from `first` on is held.
  Life ask(std::uint64_t first, std::uint64_t count) const;
  /// The same, and a second look before somebody is called dead: a process of this very pid
  /// namespace that can be seen to run, with the start time that it had, is alive.
  Life ask(std::uint64_t first, std::uint64_t count, std::uint64_t pid_namespace,
           std::span<const ProcessStart> processes) const;

 private:
  const int owned_fd_ = -1;  // -1: the caller's
  const int fd_ = -1;        // -1: cannot ask
};

}  // namespace kvelastic
