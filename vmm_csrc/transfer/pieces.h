// Bytes that travel between processes: pieces of memory, gathered on one side and scattered on the
// other. The two lists name the same number of bytes; where one piece ends is each side's own.
//
// No call can end the process: the kernel copies, so what is not mapped is an error (EFAULT) and
// not a fault. Nor does one create a page of an elastic range: what its driver has mapped is whole,
// and nothing is mapped elsewhere. Between hosts, or where the kernel does not read another
// process's memory for us, see piece_streams.h.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace kvelastic {

/// As it stands in messages: two little-endian numbers.
struct Piece {
  std::uint64_t address;
  std::uint64_t bytes;
};

using PieceDeadline = std::chrono::steady_clock::time_point;

/// How many bytes they have together; fails with kInvalidArgument where the sum, or an address and
/// its size, overflow.
Result<std::uint64_t> bytes_of(std::span<const Piece> pieces);

/// Copies another process's pieces here, by up to two threads. Blocks. Fails with
/// kInvalidArgument (the sizes differ), kMapping (not mapped on one of the sides), kChannelClosed
/// (no such process), kDeviceUnavailable (the system does not allow it), kChannelTimeout; a part
/// may have been copied.
Status read_from_process(pid_t pid, std::span<const Piece> theirs, std::span<const Piece> ours,
                         PieceDeadline deadline);

/// What is answered where the two sides of a copy differ in bytes (kInvalidArgument), where its
/// memory is not mapped (kMapping), and where its deadline has passed (kChannelTimeout).
Error other_size(std::uint64_t bytes, std::uint64_t room);
Error unmapped_in_a_copy();
Error late_copy();

}  // namespace kvelastic
