// kvcached's segment: a file in /dev/shm through which kvcached's programs read and limit memory.
// It holds three little-endian int64: the limit, the memory in use, and the memory mapped ahead of
// need, in bytes. It holds nothing else, because kvcached recognizes it by its size. A client takes
// flock() and writes the limit.
//
// *Usage* is written by the thread that publishes it in the instance's own segment, in the same
// call, if it has changed (0.5 us). So both segments show the same.
//
// *Limits* need a thread, because the maintenance thread waits on a futex. It is blocked in poll():
//   - inotify wakes it when a process closes the file after writing, or removes or renames it.
//   - A publication wakes it when the instance's own limit changes.
//   - A timeout wakes it for a client that keeps its mapping of the file, because the kernel
//   reports
//     no store into memory, and for a client that holds the lock.
// The thread turns a client's limit into an ordinary request in the instance's own segment, where
// it is acknowledged. Rule: the last writer wins. If a client and an operator have both changed the
// limit since the file and the instance last agreed, the instance's own limit wins and is written
// back. 0 and negative limits are ignored, as in kvcached.
//
// No thread waits for a lock that another process holds: without it the limit stays as it is until
// the next look. The file is not mapped: if a client truncates a mapped file, an access to it ends
// the process.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "base/descriptor.h"
#include "base/liveness_lock.h"
#include "base/own_process.h"
#include "base/status.h"
#include "segment/control_block.h"

namespace kvelastic {

/// kvcached's segment of one instance. Only the creating process removes it, in close().
class KvcachedSegment {
 public:
  /// Creates the file at `path`, or reuses one that kvcached or a dead instance left behind.
  /// `own_path` is the instance's own segment. Fails with kSegmentExists if the name belongs to
  /// another kind of file or to another user's file, and with kSegment if the system refuses.
  static Result<std::unique_ptr<KvcachedSegment>> create(
      std::string path, const std::string& own_path,
      std::shared_ptr<ControlBlockOwner> control_block);
  ~KvcachedSegment() { close(); }
  KvcachedSegment(const KvcachedSegment&) = delete;
  KvcachedSegment& operator=(const KvcachedSegment&) = delete;

  /// Starts the thread. Call it once the instance handles requests. Fails with kSegment if inotify
  /// cannot watch the file.
  Status start();
  /// Stops the thread, waits for it, and removes the file. Idempotent. Does nothing in a forked
  /// child.
  void close();
  /// Synchronizes file and instance. The thread does that; for tests without it.
  Status look();

 private:
  /// The contents of the file.
  struct Values {
    std::int64_t limit_bytes;
    std::array<std::int64_t, 2> usage_bytes;  ///< in use, mapped ahead of need
  };

  KvcachedSegment(std::string path, std::shared_ptr<ControlBlockOwner> control_block)
      : path_(std::move(path)), control_block_(std::move(control_block)) {}

  void run();
  Status keep_name();
  void request(std::int64_t limit_bytes, std::int64_t own_limit_bytes);
  static Values values_of(const Usage& usage);
  Values own_values() const;
  std::int64_t capped(std::int64_t limit_bytes) const;
  bool read(Values& out) const;
  Status write_all(const Values& own);
  void publish_usage_to_file();
  bool is_in_place() const;
  Result<bool> open();
  Status watch();
  void release();
  void remove();
  void wake() const;
  void complain(const Status& problem);
  Error failed(const char* what) const;
  Error taken(const std::string& why) const;

  const std::string path_;
  const std::shared_ptr<ControlBlockOwner> control_block_;
  const OwnProcess created_by_;
  Descriptor own_;  // the instance's own segment, for its lock
  Descriptor file_;
  std::unique_ptr<LivenessLock> liveness_lock_;
  Descriptor wake_;  // an eventfd
  Descriptor inotify_;
  /// The instance's limit, at most the capacity, when the file last agreed with it.
  std::int64_t agreed_bytes_ = 0;
  std::string complained_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvelastic
