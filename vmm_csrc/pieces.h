// Bytes that travel between processes: pieces of memory, gathered on one side and scattered on the
// other. The two lists name the same number of bytes; where one piece ends is each side's own.
//
// No call here can end the process: what is not mapped is an error of the kernel's (EFAULT), never
// a fault. The other process's memory is read by the kernel, so reading a page that is not there
// creates none.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <span>

#include "status.h"

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

/// Copies another process's pieces here, by up to two threads. Blocks. Fails with kInvalidArgument
/// (the sizes differ), kMapping (not mapped on one of the sides), kChannelClosed (no such process),
/// kDeviceUnavailable (the system does not allow it), kChannelTimeout; a part may have been copied.
Status read_from_process(pid_t pid, std::span<const Piece> theirs, std::span<const Piece> ours,
                         PieceDeadline deadline);

/// Sends pieces over a connected socket, and answers their checksum. Blocks, whatever mode the
/// socket is in. Fails with kMapping, kChannelClosed, kChannelTimeout.
Result<std::uint64_t> send_pieces(int fd, std::span<const Piece> pieces, PieceDeadline deadline);

/// Receives exactly these pieces, and answers their checksum. As send_pieces.
Result<std::uint64_t> receive_pieces(int fd, std::span<const Piece> pieces, PieceDeadline deadline);

}  // namespace kvelastic
