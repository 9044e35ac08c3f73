#include "base/memory_pieces.h"

#include <string>

namespace kvelastic {

Error other_size(std::uint64_t bytes, std::uint64_t room) {
  return {Errc::kInvalidArgument, std::to_string(bytes) + " bytes do not fit into " +
                                      std::to_string(room) +
                                      "; both sides must have the same size"};
}

Error late_copy() {
  return {Errc::kChannelTimeout, "the copy did not complete before its deadline"};
}

Error unmapped_in_a_copy() {
  return {
      Errc::kMapping,
      "a page of the copy is no longer mapped; copy only blocks that are in use, and try again"};
}

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

}  // namespace kvelastic
