// Lists of pieces as nodes pass them on: what they name, and how long ones are cut. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/memory_pieces.h"

namespace kvelastic {

/// What is held and copied at once.
struct Portion {
  std::vector<Piece> from, to;
  std::uint64_t bytes;
};

/// The same copies in parts of at most `most_pieces` on each side and `most_bytes`:
///
///     from     |-----------|------|----------|--- ...
///     to       |----|----|---------|-----|------- ...
///     portion  <------ as many as fit on both sides ------>
///
/// Fails with kInvalidArgument where the sides differ in bytes, and as bytes_of.
/// Pre: both numbers are at least 1.
Result<std::vector<Portion>> portions_of(std::span<const Piece> from, std::span<const Piece> to,
                                         std::size_t most_pieces, std::uint64_t most_bytes);

/// The pieces that lie in one of several ranges.
struct PiecesInRange {
  std::size_t range;
  std::vector<Piece> pieces;
};

/// By the range in which each lies as a whole, the ranges in the order in which pieces name them.
/// Ranges ascend, do not overlap, and end at `ends`; there are as many of both. Fails with
/// kNotRegistered, naming the piece that lies in none.
Result<std::vector<PiecesInRange>> pieces_by_range(std::span<const Piece> pieces,
                                                   std::span<const std::uint64_t> starts,
                                                   std::span<const std::uint64_t> ends);

}  // namespace kvelastic
