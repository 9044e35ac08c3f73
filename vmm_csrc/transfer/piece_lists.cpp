#include "transfer/piece_lists.h"

#include <algorithm>
#include <string>
#include <unordered_map>

namespace kvelastic {
namespace {

/// Takes pieces from the front of a list.
class Front {
 public:
  explicit Front(std::span<const Piece> pieces) : pieces_(pieces) {}

  /// The bytes of the next `most_pieces` pieces that are not empty; no more than `most_bytes`.
  std::uint64_t bytes_in(std::size_t most_pieces, std::uint64_t most_bytes) const {
    std::uint64_t bytes = 0;
    std::uint64_t taken = taken_;
    for (std::size_t at = at_; at < pieces_.size() && most_pieces > 0 && bytes < most_bytes; ++at) {
      const std::uint64_t left = pieces_[at].bytes - taken;
      taken = 0;
      bytes += left;
      most_pieces -= left > 0;
    }
    return std::min(bytes, most_bytes);
  }

  std::vector<Piece> take(std::uint64_t bytes) {
    std::vector<Piece> out;
    while (bytes > 0) {
      const Piece& piece = pieces_[at_];
      const std::uint64_t step = std::min(piece.bytes - taken_, bytes);
      if (step > 0) out.push_back({piece.address + taken_, step});
      bytes -= step;
      taken_ += step;
      if (taken_ == piece.bytes) {
        ++at_;
        taken_ = 0;
      }
    }
    return out;
  }

 private:
  std::span<const Piece> pieces_;
  std::size_t at_ = 0;
  std::uint64_t taken_ = 0;  // of the first
};

}  // namespace

Result<std::vector<Portion>> portions_of(std::span<const Piece> from, std::span<const Piece> to,
                                         std::size_t most_pieces, std::uint64_t most_bytes) {
  const Result<std::uint64_t> bytes = bytes_of(from);
  const Result<std::uint64_t> room = bytes_of(to);
  if (!bytes) return bytes.error();
  if (!room) return room.error();
  if (*bytes != *room) return other_size(*bytes, *room);
  std::vector<Portion> portions;
  Front sources(from), targets(to);
  for (std::uint64_t left = *bytes; left > 0; left -= portions.back().bytes) {
    const std::uint64_t part = std::min(sources.bytes_in(most_pieces, most_bytes),
                                        targets.bytes_in(most_pieces, most_bytes));
    portions.push_back({sources.take(part), targets.take(part), part});
  }
  return portions;
}

Result<std::vector<PiecesInRange>> pieces_by_range(std::span<const Piece> pieces,
                                                   std::span<const std::uint64_t> starts,
                                                   std::span<const std::uint64_t> ends) {
  std::vector<PiecesInRange> found;
  std::unordered_map<std::size_t, std::size_t> places;  // in `found`, by range
  std::size_t last = 0;                                 // where the piece before this one went
  for (const Piece& piece : pieces) {
    const auto after = std::upper_bound(starts.begin(), starts.end(), piece.address);
    const auto range = static_cast<std::size_t>(after - starts.begin()) - 1;
    // Not address + bytes, which may overflow.
    if (after == starts.begin() || piece.address > ends[range] ||
        piece.bytes > ends[range] - piece.address) {
      return Error{Errc::kNotRegistered, std::to_string(piece.bytes) + " bytes at address " +
                                             std::to_string(piece.address) +
                                             " are not registered as a whole"};
    }
    if (found.empty() || found[last].range != range) {
      const auto [place, is_new] = places.try_emplace(range, found.size());
      if (is_new) found.push_back({range, {}});
      last = place->second;
    }
    found[last].pieces.push_back(piece);
  }
  return found;
}

}  // namespace kvelastic
