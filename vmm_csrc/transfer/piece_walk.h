// Pieces as one run of bytes: where a copy of them has got to, and what comes next.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/memory_pieces.h"

namespace kvelastic {

/// What one system call takes: the kernel's IOV_MAX.
inline constexpr std::size_t kMostVectors = 1024;

/// Walks over pieces, and puts the next of them into vectors.
class PieceWalk {
 public:
  explicit PieceWalk(std::span<const Piece> pieces) : pieces_(pieces) { skip_empty(); }

  bool is_done() const { return at_ == pieces_.size(); }

  /// Up to `most` bytes from here on, neighbours as one; answers how many. Fewer where the pieces
  /// end, or need more than kMostVectors.
  std::uint64_t gather(std::vector<iovec>& vectors, std::uint64_t most) const {
    vectors.clear();
    std::uint64_t gathered = 0;
    std::uint64_t skip = into_;
    for (std::size_t i = at_; i < pieces_.size() && gathered < most; ++i) {
      const std::uint64_t bytes = std::min(pieces_[i].bytes - skip, most - gathered);
      auto* address =
          reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(pieces_[i].address + skip));
      skip = 0;
      if (bytes == 0) continue;
      const bool continues =
          !vectors.empty() &&
          static_cast<std::byte*>(vectors.back().iov_base) + vectors.back().iov_len == address;
      if (continues) {
        vectors.back().iov_len += bytes;
      } else if (vectors.size() == kMostVectors) {
        break;
      } else {
        vectors.push_back({address, bytes});
      }
      gathered += bytes;
    }
    return gathered;
  }

  void advance(std::uint64_t bytes) {
    while (bytes > 0) {
      const std::uint64_t step = std::min(bytes, pieces_[at_].bytes - into_);
      into_ += step;
      bytes -= step;
      skip_empty();
    }
  }

 private:
  void skip_empty() {
    while (at_ < pieces_.size() && into_ == pieces_[at_].bytes) {
      ++at_;
      into_ = 0;
    }
  }

  std::span<const Piece> pieces_;
  std::size_t at_ = 0;
  std::uint64_t into_ = 0;
};

}  // namespace kvelastic
