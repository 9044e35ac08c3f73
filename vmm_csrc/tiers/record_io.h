// Batches of records between memory and files: what a disk tier reads and writes by.
//
// Two engines do the same: io_uring, and threads with preadv and pwritev. Which one is found out
// at run time: Docker's default seccomp refuses io_uring, and so do some builds and sysctls.
//
// A file that is open with O_DIRECT wants addresses, offsets and lengths that are multiples of
// 4 KiB. A piece that is not so goes through aligned memory, padded with zeros at its end: a file
// must have that room, at an offset that is a multiple.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/own_process.h"
#include "base/status.h"
#include "tiers/record_checksum.h"

namespace kvelastic {

constexpr std::size_t kDirectAlignment = 4096;

enum class Way : std::uint8_t { kRead, kWrite };

/// One record, and where it lies. The caller's memory must stay until run() has returned.
struct RecordPiece {
  int fd = -1;
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  RecordKey key{};
  bool direct = false;  ///< set by RecordIo: the file is open with O_DIRECT

  std::int64_t result = 0;     ///< bytes moved (fewer: the file ends there), or minus errno
  std::uint64_t checksum = 0;  ///< of the memory; of a read: where all of it came
};

/// Carries pieces out. Any thread may call run(); calls of several threads run side by side.
class RecordEngine {
 public:
  virtual ~RecordEngine() = default;
  virtual std::string_view name() const = 0;
  /// Returns when every piece has its result; a piece's failure is in its result.
  virtual void run(Way way, std::span<RecordPiece> pieces) = 0;
};

enum class EngineChoice : std::uint8_t { kAuto, kUring, kThreads };

/// An engine, chosen when it is made. Any thread. Blocks as long as the files take.
class RecordIo {
 public:
  static constexpr unsigned kMaxDepth = 256;

  /// `depth`: how many pieces of one call are under way at once. Fails with kInvalidArgument, or
  /// with kDeviceUnavailable where kUring is asked for and the system has none for this process.
  static Result<std::unique_ptr<RecordIo>> create(EngineChoice choice, unsigned depth);
  RecordIo(const RecordIo&) = delete;
  RecordIo& operator=(const RecordIo&) = delete;
  ~RecordIo();

  std::string_view engine() const { return engine_->name(); }
  unsigned depth() const { return depth_; }
  const OwnProcess& made_by() const { return made_by_; }

  /// Pre: made_by().is_this().
  void run(Way way, std::span<RecordPiece> pieces);

 private:
  RecordIo(std::unique_ptr<RecordEngine> engine, unsigned depth)
      : engine_(std::move(engine)), depth_(depth) {}

  std::unique_ptr<RecordEngine> engine_;
  const unsigned depth_;
  const OwnProcess made_by_;
};

/// Gives the room of a part of a file back to the file system; reads as zeros. 0, or errno.
int release_range(int fd, std::uint64_t offset, std::uint64_t bytes);

/// Makes a part of a file read as zeros and keeps its room. 0, or errno.
int zero_range(int fd, std::uint64_t offset, std::uint64_t bytes);

}  // namespace kvelastic
