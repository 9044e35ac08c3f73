// Pieces of memory: a copy gathers them on one side and scatters them on the other. Both lists have
// the same total size; each side chooses its own boundaries.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace kvelastic {

/// Encoded in messages as two little-endian 64-bit integers.
struct Piece {
  std::uint64_t address;
  std::uint64_t bytes;
};

using PieceDeadline = std::chrono::steady_clock::time_point;

/// Returns the total size of the pieces. Fails with kInvalidArgument if the sum, or the end of a
/// piece, overflows.
Result<std::uint64_t> bytes_of(std::span<const Piece> pieces);

/// Errors of a copy: the sides differ in size (kInvalidArgument), memory is not mapped (kMapping),
/// the deadline has passed (kChannelTimeout).
Error other_size(std::uint64_t bytes, std::uint64_t room);
Error unmapped_in_a_copy();
Error late_copy();

}  // namespace kvelastic
