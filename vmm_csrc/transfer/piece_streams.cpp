#include "transfer/piece_streams.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "tiers/record_checksum.h"
#include "transfer/kernel_copy.h"
#include "transfer/piece_walk.h"

namespace kvelastic {
namespace {

/// Small enough for the second cache of any server's processor, large enough that a call's own cost
/// does not show. Both sides sum chunks of this size: another one is another protocol.
constexpr std::uint64_t kChunkBytes = std::uint64_t{256} << 10;

/// The bytes of a stream, a chunk at a time, and their checksum so far.
class Chunks {
 public:
  /// Pre: bytes_of(pieces) is `bytes`.
  Chunks(std::span<const Piece> pieces, std::uint64_t bytes) : walk_(pieces), left_(bytes) {
    memory_.resize(std::min(left_, kChunkBytes));
  }

  /// The next chunk, to be filled from the pieces or the socket; empty at the end.
  std::span<std::byte> next() {
    const std::uint64_t bytes = std::min(left_, kChunkBytes);
    left_ -= bytes;
    return std::span(memory_).first(bytes);
  }

  Status gather(std::span<std::byte> chunk) {
    return along(chunk, [&](std::span<std::byte> part) { return copy_.gather(vectors_, part); });
  }

  Status scatter(std::span<std::byte> chunk) {
    return along(chunk, [&](std::span<std::byte> part) { return copy_.scatter(part, vectors_); });
  }

  /// A chunk is summed with the sum before it as its key, so their order counts.
  void add_to_sum(std::span<const std::byte> chunk) {
    RecordKey key{};
    std::memcpy(key.data(), &sum_, sizeof sum_);
    sum_ = record_checksum(chunk, key);
  }

  std::uint64_t sum() const { return sum_; }

 private:
  /// In as many calls as the pieces of a chunk need vectors.
  template <typename Copy>
  Status along(std::span<std::byte> chunk, Copy copy) {
    while (!chunk.empty()) {
      const std::uint64_t bytes = walk_.gather(vectors_, chunk.size());
      if (Status copied = copy(chunk.first(bytes)); !copied) return copied;
      walk_.advance(bytes);
      chunk = chunk.subspan(bytes);
    }
    return ok();
  }

  PieceWalk walk_;
  std::uint64_t left_;
  KernelCopy copy_;
  std::vector<iovec> vectors_;
  std::vector<std::byte> memory_;
  std::uint64_t sum_ = 0;
};

Error gone(int error) {
  return {Errc::kChannelClosed,
          std::string("the peer of a data stream has gone: ") + std::strerror(error)};
}

Status wait_for(int fd, short events, PieceDeadline deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return late_copy();
    pollfd polled{fd, events, 0};
    const int ready =
        ::poll(&polled, 1, static_cast<int>(std::min<std::int64_t>(left.count(), 1000)));
    if (ready > 0) return ok();
    if (ready < 0 && errno != EINTR) return gone(errno);
  }
}

/// After a call that took nothing: waits where the socket was full or empty, else says why.
Status after_refusal(int fd, short events, PieceDeadline deadline) {
  if (errno == EAGAIN) return wait_for(fd, events, deadline);
  if (errno == EINTR) return ok();
  return gone(errno);
}

Status send_all(int fd, std::span<const std::byte> chunk, PieceDeadline deadline) {
  while (!chunk.empty()) {
    if (std::chrono::steady_clock::now() >= deadline) return late_copy();
    const ssize_t sent = ::send(fd, chunk.data(), chunk.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      chunk = chunk.subspan(static_cast<std::size_t>(sent));
    } else if (Status ready = after_refusal(fd, POLLOUT, deadline); !ready) {
      return ready;
    }
  }
  return ok();
}

Status receive_all(int fd, std::span<std::byte> chunk, PieceDeadline deadline) {
  while (!chunk.empty()) {
    if (std::chrono::steady_clock::now() >= deadline) return late_copy();
    const ssize_t received = ::recv(fd, chunk.data(), chunk.size(), MSG_DONTWAIT);
    if (received > 0) {
      chunk = chunk.subspan(static_cast<std::size_t>(received));
    } else if (received == 0) {
      return Error{Errc::kChannelClosed, "the peer ended a data stream in the middle"};
    } else if (Status ready = after_refusal(fd, POLLIN, deadline); !ready) {
      return ready;
    }
  }
  return ok();
}

}  // namespace

Result<std::uint64_t> send_pieces(int fd, std::span<const Piece> pieces, PieceDeadline deadline) {
  const Result<std::uint64_t> bytes = bytes_of(pieces);
  if (!bytes) return bytes.error();
  Chunks chunks(pieces, *bytes);
  for (auto chunk = chunks.next(); !chunk.empty(); chunk = chunks.next()) {
    if (Status taken = chunks.gather(chunk); !taken) return taken.error();
    chunks.add_to_sum(chunk);
    if (Status sent = send_all(fd, chunk, deadline); !sent) return sent.error();
  }
  return chunks.sum();
}

Result<std::uint64_t> receive_pieces(int fd, std::span<const Piece> pieces,
                                     PieceDeadline deadline) {
  const Result<std::uint64_t> bytes = bytes_of(pieces);
  if (!bytes) return bytes.error();
  Chunks chunks(pieces, *bytes);
  for (auto chunk = chunks.next(); !chunk.empty(); chunk = chunks.next()) {
    if (Status received = receive_all(fd, chunk, deadline); !received) return received.error();
    chunks.add_to_sum(chunk);
    if (Status put = chunks.scatter(chunk); !put) return put.error();
  }
  return chunks.sum();
}

}  // namespace kvelastic
