#include "transfer/process_copy.h"

#include <sched.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "transfer/piece_walk.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kBytesACall = std::uint64_t{8} << 20;  // between two looks at the clock
// One thread's copy is bounded by how fast a processor reads for the kernel, not by the memory.
constexpr std::uint64_t kBytesAThread = std::uint64_t{4} << 20;
constexpr std::uint64_t kMostThreads = 2;

/// How many threads copy that much: as many as there is work for, on processors that we may use.
std::uint64_t threads_for(std::uint64_t bytes) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  const std::uint64_t most = std::min<std::uint64_t>(kMostThreads, CPU_COUNT(&allowed));
  return std::clamp<std::uint64_t>(bytes / kBytesAThread, 1, std::max<std::uint64_t>(most, 1));
}

/// The next `left` bytes of both walks; as read_from_process.
Status read_part(pid_t pid, PieceWalk from, PieceWalk to, std::uint64_t left,
                 PieceDeadline deadline) {
  std::vector<iovec> from_vectors, to_vectors;
  from_vectors.reserve(kMostVectors);
  to_vectors.reserve(kMostVectors);
  while (left > 0) {
    if (std::chrono::steady_clock::now() >= deadline) return late_copy();
    const std::uint64_t there = from.gather(from_vectors, std::min(left, kBytesACall));
    const std::uint64_t here = to.gather(to_vectors, there);
    if (here < there) (void)from.gather(from_vectors, here);
    const ssize_t copied = ::process_vm_readv(pid, to_vectors.data(), to_vectors.size(),
                                              from_vectors.data(), from_vectors.size(), 0);
    if (copied > 0) {
      from.advance(static_cast<std::uint64_t>(copied));
      to.advance(static_cast<std::uint64_t>(copied));
      left -= static_cast<std::uint64_t>(copied);
      continue;
    }
    const int error = copied == 0 ? EFAULT : errno;
    if (error == ESRCH) return Error{Errc::kChannelClosed, "the peer's process has ended"};
    if (error == EFAULT) return unmapped_in_a_copy();
    return Error{
        Errc::kDeviceUnavailable,
        std::string("memory of another process cannot be read here: ") + std::strerror(error)};
  }
  return ok();
}

}  // namespace

Status read_from_process(pid_t pid, std::span<const Piece> theirs, std::span<const Piece> ours,
                         PieceDeadline deadline) {
  const Result<std::uint64_t> their_bytes = bytes_of(theirs);
  const Result<std::uint64_t> our_bytes = bytes_of(ours);
  if (!their_bytes) return their_bytes.error();
  if (!our_bytes) return our_bytes.error();
  if (*their_bytes != *our_bytes) return other_size(*their_bytes, *our_bytes);
  const std::uint64_t threads = threads_for(*our_bytes);
  if (threads == 1) return read_part(pid, PieceWalk(theirs), PieceWalk(ours), *our_bytes, deadline);
  const std::uint64_t half = *our_bytes / 2;
  PieceWalk from(theirs), to(ours);
  from.advance(half);
  to.advance(half);
  Status second = ok();
  std::jthread beside;
  try {
    beside = std::jthread([&] { second = read_part(pid, from, to, *our_bytes - half, deadline); });
  } catch (const std::system_error&) {  // no thread is to be had: one does it all
    return read_part(pid, PieceWalk(theirs), PieceWalk(ours), *our_bytes, deadline);
  }
  const Status first = read_part(pid, PieceWalk(theirs), PieceWalk(ours), half, deadline);
  beside.join();
  return first ? second : first;
}

}  // namespace kvelastic
