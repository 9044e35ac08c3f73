#include "pieces.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "record_checksum.h"

namespace kvelastic {
namespace {

constexpr std::size_t kVectors = 1024;                         // the kernel's IOV_MAX
constexpr std::uint64_t kBytesACall = std::uint64_t{8} << 20;  // between two looks at the clock
// One thread's copy is bounded by how fast a processor reads for the kernel, not by the memory.
constexpr std::uint64_t kBytesAThread = std::uint64_t{4} << 20;
constexpr std::uint64_t kMostThreads = 2;
constexpr std::uint64_t kSumBytes = std::uint64_t{1} << 20;  // see Checksum

/// Walks over pieces as one run of bytes, and puts the next of them into vectors.
class Walk {
 public:
  explicit Walk(std::span<const Piece> pieces) : pieces_(pieces) { skip_empty(); }

  bool is_done() const { return at_ == pieces_.size(); }

  /// Up to `most` bytes from here on, neighbours as one; answers how many.
  std::uint64_t gather(std::vector<iovec>& vectors, std::uint64_t most) const {
    vectors.clear();
    std::uint64_t gathered = 0;
    std::uint64_t skip = into_;
    for (std::size_t i = at_; i < pieces_.size() && gathered < most; ++i) {
      const std::uint64_t bytes = std::min(pieces_[i].bytes - skip, most - gathered);
      auto* address =
          reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(pieces_[i].address + skip));
      skip = 0;
      if (bytes == 0) continue;
      const bool continues =
          !vectors.empty() &&
          static_cast<std::byte*>(vectors.back().iov_base) + vectors.back().iov_len == address;
      if (continues) {
        vectors.back().iov_len += bytes;
      } else if (vectors.size() == kVectors) {
        break;
      } else {
        vectors.push_back({address, bytes});
      }
      gathered += bytes;
    }
    return gathered;
  }

  void advance(std::uint64_t bytes) {
    while (bytes > 0) {
      const std::uint64_t step = std::min(bytes, pieces_[at_].bytes - into_);
      into_ += step;
      bytes -= step;
      skip_empty();
    }
  }

 private:
  void skip_empty() {
    while (at_ < pieces_.size() && into_ == pieces_[at_].bytes) {
      ++at_;
      into_ = 0;
    }
  }

  std::span<const Piece> pieces_;
  std::size_t at_ = 0;
  std::uint64_t into_ = 0;
};

/// Of a stream, whatever the pieces are: bytes are summed in runs of kSumBytes, over a copy in
/// cache-sized parts. The copy is also what makes it safe: the kernel has read the bytes that are
/// summed, so a page that has gone is an error before.
class Checksum {
 public:
  Checksum() { buffer_.reserve(kSumBytes); }
  void add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::size_t room = std::min<std::size_t>(kSumBytes - buffer_.size(), bytes.size());
      buffer_.insert(buffer_.end(), bytes.begin(),
                     bytes.begin() + static_cast<std::ptrdiff_t>(room));
      bytes = bytes.subspan(room);
      if (buffer_.size() == kSumBytes) fold();
    }
  }
  std::uint64_t value() {
    if (!buffer_.empty()) fold();
    return sum_;
  }

 private:
  void fold() {
    RecordKey key{};
    std::memcpy(key.data(), &sum_, sizeof sum_);
    sum_ = record_checksum(buffer_, key);
    buffer_.clear();
  }

  std::vector<std::byte> buffer_;
  std::uint64_t sum_ = 0;
};

Error late() {
  return {Errc::kChannelTimeout, "the bytes did not travel in time; the copy is not complete"};
}

Error unmapped() {
  return {Errc::kMapping,
          "memory of a copy is not mapped by now; ask for blocks that are in use, and try again"};
}

Error of_socket(int error) {
  if (error == EFAULT) return unmapped();
  return {Errc::kChannelClosed,
          std::string("the peer of a data stream has gone: ") + std::strerror(error)};
}

Status wait_for(int fd, short events, PieceDeadline deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return late();
    pollfd polled{fd, events, 0};
    const int ready =
        ::poll(&polled, 1, static_cast<int>(std::min<std::int64_t>(left.count(), 1000)));
    if (ready > 0) return ok();
    if (ready < 0 && errno != EINTR) return of_socket(errno);
  }
}

bool copy_own(std::span<const iovec> vectors, std::uint64_t bytes, std::vector<std::byte>& out) {
  out.resize(bytes);
  iovec into{out.data(), bytes};
  // Through the kernel: what is not mapped is an error.
  return ::process_vm_readv(::getpid(), &into, 1, vectors.data(), vectors.size(), 0) ==
         static_cast<ssize_t>(bytes);
}

/// How many threads copy that much: as many as there is work for, on processors that we may use.
std::uint64_t threads_for(std::uint64_t bytes) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  const std::uint64_t most = std::min<std::uint64_t>(kMostThreads, CPU_COUNT(&allowed));
  return std::clamp<std::uint64_t>(bytes / kBytesAThread, 1, std::max<std::uint64_t>(most, 1));
}

/// The next `left` bytes of both walks; as read_from_process.
Status read_part(pid_t pid, Walk from, Walk to, std::uint64_t left, PieceDeadline deadline) {
  std::vector<iovec> from_vectors, to_vectors;
  from_vectors.reserve(kVectors);
  to_vectors.reserve(kVectors);
  while (left > 0) {
    if (std::chrono::steady_clock::now() >= deadline) return late();
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
    if (errno == ESRCH) return Error{Errc::kChannelClosed, "the peer's process has ended"};
    if (errno == EFAULT || copied == 0) return unmapped();
    return Error{
        Errc::kDeviceUnavailable,
        std::string("memory of another process cannot be read here: ") + std::strerror(errno)};
  }
  return ok();
}

}  // namespace

Result<std::uint64_t> bytes_of(std::span<const Piece> pieces) {
  std::uint64_t sum = 0;
  for (const Piece& piece : pieces) {
    std::uint64_t end = 0;
    if (__builtin_add_overflow(piece.address, piece.bytes, &end) ||
        __builtin_add_overflow(sum, piece.bytes, &sum)) {
      return Error{Errc::kInvalidArgument, "pieces that reach beyond the last address"};
    }
  }
  return sum;
}

Status read_from_process(pid_t pid, std::span<const Piece> theirs, std::span<const Piece> ours,
                         PieceDeadline deadline) {
  const Result<std::uint64_t> their_bytes = bytes_of(theirs);
  const Result<std::uint64_t> our_bytes = bytes_of(ours);
  if (!their_bytes) return their_bytes.error();
  if (!our_bytes) return our_bytes.error();
  if (*their_bytes != *our_bytes) {
    return Error{Errc::kInvalidArgument, std::to_string(*their_bytes) + " bytes do not fit into " +
                                             std::to_string(*our_bytes)};
  }
  const std::uint64_t threads = threads_for(*our_bytes);
  if (threads == 1) return read_part(pid, Walk(theirs), Walk(ours), *our_bytes, deadline);
  const std::uint64_t half = *our_bytes / 2;
  Walk from(theirs), to(ours);
  from.advance(half);
  to.advance(half);
  Status second = ok();
  std::jthread beside;
  try {
    beside = std::jthread([&] { second = read_part(pid, from, to, *our_bytes - half, deadline); });
  } catch (const std::system_error&) {  // no thread is to be had: one does it all
    return read_part(pid, Walk(theirs), Walk(ours), *our_bytes, deadline);
  }
  const Status first = read_part(pid, Walk(theirs), Walk(ours), half, deadline);
  beside.join();
  return first ? second : first;
}

Result<std::uint64_t> send_pieces(int fd, std::span<const Piece> pieces, PieceDeadline deadline) {
  Walk walk(pieces);
  Checksum sum;
  std::vector<iovec> vectors;
  std::vector<std::byte> copy;
  // What is summed is what is sent: the bytes are taken out of the pieces once.
  while (!walk.is_done()) {
    const std::uint64_t gathered = walk.gather(vectors, kSumBytes);
    if (!copy_own(vectors, gathered, copy)) return unmapped();
    sum.add(copy);
    for (std::size_t sent = 0; sent < copy.size();) {
      const ssize_t done =
          ::send(fd, copy.data() + sent, copy.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (done >= 0) {
        sent += static_cast<std::size_t>(done);
      } else if (errno == EAGAIN) {
        if (Status ready = wait_for(fd, POLLOUT, deadline); !ready) return ready.error();
      } else if (errno != EINTR) {
        return of_socket(errno);
      }
      if (std::chrono::steady_clock::now() >= deadline) return late();
    }
    walk.advance(gathered);
  }
  return sum.value();
}

Result<std::uint64_t> receive_pieces(int fd, std::span<const Piece> pieces,
                                     PieceDeadline deadline) {
  Walk walk(pieces);
  Checksum sum;
  std::vector<iovec> vectors;
  std::vector<std::byte> received;
  while (!walk.is_done()) {
    const std::uint64_t wanted = walk.gather(vectors, kSumBytes);
    received.resize(wanted);
    std::uint64_t got = 0;
    while (got < wanted) {
      const ssize_t done = ::recv(fd, received.data() + got, wanted - got, MSG_DONTWAIT);
      if (done > 0) {
        got += static_cast<std::uint64_t>(done);
      } else if (done == 0) {
        return Error{Errc::kChannelClosed, "the peer ended a data stream in the middle"};
      } else if (errno == EAGAIN) {
        if (Status ready = wait_for(fd, POLLIN, deadline); !ready) return ready.error();
      } else if (errno != EINTR) {
        return of_socket(errno);
      }
      if (std::chrono::steady_clock::now() >= deadline) return late();
    }
    sum.add(received);
    const iovec from{received.data(), wanted};
    if (::process_vm_readv(::getpid(), vectors.data(), vectors.size(), &from, 1, 0) !=
        static_cast<ssize_t>(wanted)) {
      return unmapped();
    }
    walk.advance(wanted);
  }
  return sum.value();
}

}  // namespace kvelastic
