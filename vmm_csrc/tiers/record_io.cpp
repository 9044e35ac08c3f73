#include "tiers/record_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "tiers/record_threads.h"
#include "tiers/record_uring.h"

#ifndef FALLOC_FL_KEEP_SIZE
#include <linux/falloc.h>
#endif

namespace kvelastic {
namespace {

int allocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) {
  int failed = 0;
  do {
    failed = ::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0
                 ? 0
                 : errno;
  } while (failed == EINTR);
  return failed;
}

}  // namespace

Result<std::unique_ptr<RecordIo>> RecordIo::create(EngineChoice choice, unsigned depth) {
  if (depth < 1 || depth > kMaxDepth) {
    return Error{Errc::kInvalidArgument, "a depth of " + std::to_string(depth) +
                                             " records; give 1 to " + std::to_string(kMaxDepth)};
  }
  std::unique_ptr<RecordEngine> engine;
  if (choice != EngineChoice::kThreads) {
    int why = 0;
    engine = make_uring_engine(depth, why);
    if (engine == nullptr && choice == EngineChoice::kUring) {
      return Error{Errc::kDeviceUnavailable,
                   "io_uring cannot be used here (" + std::string(std::strerror(why)) +
                       "; a container's seccomp profile may forbid it); ask for threads"};
    }
  }
  if (engine == nullptr) engine = std::make_unique<ThreadEngine>(depth);
  return std::unique_ptr<RecordIo>(new RecordIo(std::move(engine), depth));
}

RecordIo::~RecordIo() {
  // In a forked child the threads are not there to be joined, and the rings are the parent's.
  if (!made_by_.is_this()) (void)engine_.release();
}

void RecordIo::run(Way way, std::span<RecordPiece> pieces) {
  int last = -1;
  bool direct = false;
  for (RecordPiece& piece : pieces) {
    if (piece.fd != last) {
      const int flags = ::fcntl(piece.fd, F_GETFL);
      direct = flags >= 0 && (flags & O_DIRECT) != 0;
      last = piece.fd;
    }
    piece.direct = direct;
  }
  engine_->run(way, pieces);
}

int release_range(int fd, std::uint64_t offset, std::uint64_t bytes) {
  return allocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

int zero_range(int fd, std::uint64_t offset, std::uint64_t bytes) {
  const int failed = allocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, offset, bytes);
  if (failed != EOPNOTSUPP && failed != ENOSYS) return failed;
  static constexpr std::array<std::byte, 65536> zeros{};
  for (std::uint64_t done = 0; done < bytes;) {
    const auto part = static_cast<std::size_t>(std::min<std::uint64_t>(bytes - done, zeros.size()));
    const ssize_t written = ::pwrite(fd, zeros.data(), part, static_cast<off_t>(offset + done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : EIO;
    done += static_cast<std::uint64_t>(written);
  }
  return 0;
}

}  // namespace kvelastic
