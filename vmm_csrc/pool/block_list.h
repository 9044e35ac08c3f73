// Lists of blocks, oldest first. All lists share one array of links, and a block is in at most one
// of them.
#pragma once

#include <cstdint>

#include "base/lazy_array.h"

namespace kvelastic {

/// A block's neighbours: index + 1, or 0 for none.
struct BlockLink {
  std::uint32_t older;
  std::uint32_t newer;
};
using BlockLinks = LazyArray<BlockLink>;

class BlockList {
 public:
  explicit BlockList(BlockLinks& links) : links_(links) {}

  std::uint64_t size() const { return size_; }
  /// Index + 1 of the oldest block; 0 if the list is empty.
  std::uint32_t oldest() const { return oldest_; }
  /// Index + 1 of the block after `at`, which is also an index + 1; 0 at the end.
  std::uint32_t after(std::uint32_t at) const { return links_[at - 1].newer; }

  void append(std::uint32_t block) {
    const std::uint32_t self = block + 1;
    links_[block] = {newest_, 0};
    (newest_ != 0 ? links_[newest_ - 1].newer : oldest_) = self;
    newest_ = self;
    ++size_;
  }
  /// Puts `fresh` in the place of `old`.
  void replace(std::uint32_t old, std::uint32_t fresh) {
    const BlockLink link = links_[old];
    const std::uint32_t self = fresh + 1;
    links_[fresh] = link;
    (link.older != 0 ? links_[link.older - 1].newer : oldest_) = self;
    (link.newer != 0 ? links_[link.newer - 1].older : newest_) = self;
  }
  void remove(std::uint32_t block) {
    const BlockLink link = links_[block];
    (link.older != 0 ? links_[link.older - 1].newer : oldest_) = link.newer;
    (link.newer != 0 ? links_[link.newer - 1].older : newest_) = link.older;
    --size_;
  }

 private:
  BlockLinks& links_;
  std::uint32_t oldest_ = 0;
  std::uint32_t newest_ = 0;
  std::uint64_t size_ = 0;
};

}  // namespace kvelastic
