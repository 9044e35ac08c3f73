#include "segment/control_block_copy.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "segment/control_block.h"

namespace kvelastic {
namespace {

using Revisions = std::array<std::uint64_t, 3>;

/// Reads until `out` is full or the file ends. Returns 0 or errno.
int read_start(int fd, std::span<std::byte> out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(fd, out.data() + done, out.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return 0;
    done += static_cast<std::size_t>(got);
  }
  return 0;
}

/// Reads the current revisions of the file's latches; zeros beyond the file's end. Returns 0 or
/// errno.
int read_revisions(int fd, Revisions& out) {
  std::array<std::byte, kControlBlockBytes> control_block{};
  if (const int problem = read_start(fd, control_block)) return problem;
  const auto at = [&](std::size_t offset) {
    std::uint64_t revision = 0;
    std::memcpy(&revision, control_block.data() + offset, sizeof(revision));
    return revision;
  };
  out = {at(offsetof(ControlBlockLayout, request)), at(offsetof(ControlBlockLayout, ack)),
         at(offsetof(ControlBlockLayout, usage))};
  return 0;
}

}  // namespace

// One read() copies in no guaranteed order, so a latch's slots may be older or newer than its
// revision in the copy. If the revision is the same before and after the copy, no writer has
// touched the newest value's slot in between (see latch_write), and the value is whole.
int copy_control_block(int fd, std::span<std::byte> out) {
  out = out.first(std::min(out.size(), kControlBlockBytes));
  Revisions before{};
  Revisions after{};
  if (const int problem = read_revisions(fd, before)) return problem;
  for (int i = 0; i < kLatchReadTries; ++i) {
    if (const int problem = read_start(fd, out)) return problem;
    if (const int problem = read_revisions(fd, after)) return problem;
    if (before == after) break;
    before = after;
  }
  return 0;
}

}  // namespace kvelastic
