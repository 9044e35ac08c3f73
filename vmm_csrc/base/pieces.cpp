#include "base/pieces.h"

#include <string>

namespace kvelastic {

Error other_size(std::uint64_t bytes, std::uint64_t room) {
  return {Errc::kInvalidArgument, std::to_string(bytes) + " bytes do not fit into " +
                                      std::to_string(room) + "; name as many on both sides"};
}

Error late_copy() {
  return {Errc::kChannelTimeout, "the bytes did not travel in time; the copy is not complete"};
}

Error unmapped_in_a_copy() {
  return {Errc::kMapping,
          "memory of a copy is not mapped by now; ask for blocks that are in use, and try again"};
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
