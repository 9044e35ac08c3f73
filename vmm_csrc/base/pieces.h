// Pieces of memory: what a copy gathers on one side and scatters on the other. Both lists name the
// same number of bytes; each side chooses its own boundaries.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace kvelastic {

/// In messages: two little-endian numbers.
struct Piece {
  std::uint64_t address;
  std::uint64_t bytes;
};

using PieceDeadline = std::chrono::steady_clock::time_point;

/// The total size of the pieces. Fails with kInvalidArgument if the sum overflows, or an address
/// and its size do.
Result<std::uint64_t> bytes_of(std::span<const Piece> pieces);

/// The errors of a copy: its two sides differ in bytes (kInvalidArgument), its memory is not mapped
/// (kMapping), its deadline has passed (kChannelTimeout).
Error other_size(std::uint64_t bytes, std::uint64_t room);
Error unmapped_in_a_copy();
Error late_copy();

}  // namespace kvelastic
