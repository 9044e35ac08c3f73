// Copies between any memory of this process. The kernel makes them, so memory that is not mapped is
// an error and never a fault, also where a page goes in the middle of a copy.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>

#include "base/memory_pieces.h"
#include "base/status.h"

namespace kvelastic {

/// For one thread at a time.
///
/// By process_vm_readv on this process. Where the system does not allow that (seccomp in some
/// containers), through a pipe, at about half the speed; the pipe is opened when it is needed.
class KernelCopy {
 public:
  KernelCopy() = default;
  KernelCopy(const KernelCopy&) = delete;
  KernelCopy& operator=(const KernelCopy&) = delete;
  ~KernelCopy();

  /// Fills `buffer` from memory that has as many bytes; at most kMostVectors of it. Fails with
  /// kMapping (not mapped; a part may have been copied), kDeviceUnavailable (no pipe can be had).
  Status gather(std::span<const iovec> from, std::span<std::byte> buffer);

  /// Spreads `buffer` over memory that has as many bytes. As gather.
  Status scatter(std::span<const std::byte> buffer, std::span<const iovec> to);

  /// From one list to the other, which has as many bytes. As gather.
  Status copy(std::span<const iovec> from, std::span<const iovec> to);

 private:
  Status through_pipe(std::span<const iovec> from, std::span<const iovec> to);
  void close_pipe();

  int read_end_ = -1;
  int write_end_ = -1;
};

/// Copies pieces of this process to others of it, in order. Blocks. Fails with kInvalidArgument
/// (the sizes differ), and as KernelCopy: what comes before that in the order is copied then, and
/// maybe some of what comes after.
Status copy_pieces(std::span<const Piece> from, std::span<const Piece> to);

}  // namespace kvelastic
