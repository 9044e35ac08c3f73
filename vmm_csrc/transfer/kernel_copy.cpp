#include "transfer/kernel_copy.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "transfer/piece_walk.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kBytesACall = std::uint64_t{64} << 20;  // the kernel takes 2 GiB at most

/// Vectors that get shorter from the front.
class Rest {
 public:
  explicit Rest(std::span<const iovec> vectors) : vectors_(vectors.begin(), vectors.end()) {
    advance(0);
  }
  bool is_done() const { return at_ == vectors_.size(); }
  const iovec* data() const { return vectors_.data() + at_; }
  int count() const { return static_cast<int>(vectors_.size() - at_); }
  void advance(std::size_t bytes) {
    while (at_ < vectors_.size() && bytes >= vectors_[at_].iov_len) {
      bytes -= vectors_[at_].iov_len;
      ++at_;
    }
    if (bytes > 0) {
      vectors_[at_].iov_base = static_cast<std::byte*>(vectors_[at_].iov_base) + bytes;
      vectors_[at_].iov_len -= bytes;
    }
  }

 private:
  std::vector<iovec> vectors_;
  std::size_t at_ = 0;
};

Error refused(const char* what, int error) {
  if (error == EFAULT) return unmapped_in_a_copy();
  return {Errc::kDeviceUnavailable, std::string(what) + std::strerror(error)};
}

std::size_t bytes_in(std::span<const iovec> vectors) {
  std::size_t sum = 0;
  for (const iovec& each : vectors) sum += each.iov_len;
  return sum;
}

}  // namespace

KernelCopy::~KernelCopy() {
  close_pipe();
}

void KernelCopy::close_pipe() {
  for (int* end : {&read_end_, &write_end_}) {
    if (*end >= 0) ::close(std::exchange(*end, -1));
  }
}

Status KernelCopy::gather(std::span<const iovec> from, std::span<std::byte> buffer) {
  const iovec whole{buffer.data(), buffer.size()};
  return copy(from, {&whole, 1});
}

Status KernelCopy::scatter(std::span<const std::byte> buffer, std::span<const iovec> to) {
  // iovec has no const; nothing writes there.
  const iovec whole{const_cast<std::byte*>(buffer.data()), buffer.size()};
  return copy({&whole, 1}, to);
}

Status KernelCopy::copy(std::span<const iovec> from, std::span<const iovec> to) {
  if (read_end_ < 0) {
    const ssize_t copied =
        ::process_vm_readv(::getpid(), to.data(), to.size(), from.data(), from.size(), 0);
    if (copied >= 0 && static_cast<std::size_t>(copied) == bytes_in(to)) return ok();
    if (copied >= 0 || errno == EFAULT) return unmapped_in_a_copy();
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
      return refused("no pipe can be opened for a copy; raise `ulimit -n`: ", errno);
    }
    read_end_ = ends[0];
    write_end_ = ends[1];
  }
  Status copied = through_pipe(from, to);
  if (!copied) close_pipe();  // what is still inside belongs to no other copy
  return copied;
}

Status KernelCopy::through_pipe(std::span<const iovec> from, std::span<const iovec> to) {
  std::size_t inside = 0;
  Rest source(from), target(to);
  while (!target.is_done()) {
    if (!source.is_done()) {
      const ssize_t in = ::writev(write_end_, source.data(), source.count());
      if (in < 0 && errno != EAGAIN && errno != EINTR) {
        return refused("a copy through a pipe failed: ", errno);
      }
      if (in > 0) {
        source.advance(static_cast<std::size_t>(in));
        inside += static_cast<std::size_t>(in);
      }
    }
    while (inside > 0) {
      const ssize_t out = ::readv(read_end_, target.data(), target.count());
      if (out < 0 && errno == EINTR) continue;
      if (out <= 0) return refused("a copy through a pipe failed: ", errno);
      target.advance(static_cast<std::size_t>(out));
      inside -= static_cast<std::size_t>(out);
    }
  }
  return ok();
}

Status copy_pieces(std::span<const Piece> from, std::span<const Piece> to) {
  const Result<std::uint64_t> bytes = bytes_of(from), room = bytes_of(to);
  if (!bytes) return bytes.error();
  if (!room) return room.error();
  if (*bytes != *room) return other_size(*bytes, *room);
  KernelCopy kernel;
  PieceWalk source(from), target(to);
  std::vector<iovec> from_vectors, to_vectors;
  for (std::uint64_t left = *bytes; left > 0;) {
    const std::uint64_t there = source.gather(from_vectors, std::min(left, kBytesACall));
    const std::uint64_t here = target.gather(to_vectors, there);
    if (here < there) (void)source.gather(from_vectors, here);
    if (Status copied = kernel.copy(from_vectors, to_vectors); !copied) return copied;
    source.advance(here);
    target.advance(here);
    left -= here;
  }
  return ok();
}

}  // namespace kvelastic
