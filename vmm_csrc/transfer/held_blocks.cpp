#include "transfer/held_blocks.h"

#include <algorithm>
#include <string>

namespace kvelastic {

Result<std::vector<BlockId>> blocks_in(const Geometry& geometry, std::uint64_t base,
                                       std::span<const Piece> pieces) {
  std::vector<BlockId> ids;
  ids.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    const std::uint64_t begin = piece.address - base;  // of an address before it: beyond the range
    if (piece.bytes == 0) continue;
    if (begin >= geometry.range_bytes() || piece.bytes > geometry.range_bytes() - begin) {
      return Error{Errc::kInvalidArgument, "a piece that does not lie in the pool"};
    }
    for (std::uint64_t at = begin; at < begin + piece.bytes;) {
      const std::uint64_t in_extent =
          geometry.extents_per_page > 1 ? at % geometry.extent_stride_bytes : at;
      const std::uint64_t page = in_extent / geometry.extent_bytes;
      const std::uint64_t block = in_extent / geometry.block_bytes;
      // Where the page's first block begins, counted in blocks from the start of the extents.
      const auto first =
          static_cast<std::uint64_t>(geometry.first_id(static_cast<PageIndex>(page)));
      const std::uint64_t slice = (block - first) / geometry.blocks_per_page;
      if (page >= geometry.pages || block < first || slice >= geometry.buffers_per_extent) {
        return Error{Errc::kInvalidArgument, "no block lies at byte " + std::to_string(at) +
                                                 " of the pool (page " + std::to_string(page) +
                                                 ")"};
      }
      ids.push_back(static_cast<BlockId>(first + (block - first) % geometry.blocks_per_page));
      at += geometry.block_bytes - in_extent % geometry.block_bytes;
    }
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

Result<std::unique_ptr<HeldBlocks>> HeldBlocks::hold(std::shared_ptr<Range> range,
                                                     std::shared_ptr<Pool> pool,
                                                     std::span<const Piece> pieces) {
  const Geometry geometry = range->geometry();
  const auto base = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(range->address()));
  const Result<std::vector<BlockId>> ids = blocks_in(geometry, base, pieces);
  if (!ids) return ids.error();
  const Result<PinTicket> ticket = pool->allocator.pin(*ids, PinKind::kStrict);
  if (!ticket) return ticket.error();
  std::unique_ptr<HeldBlocks> held(new HeldBlocks(std::move(range), std::move(pool), *ticket));
  // Pinned first: a page of a pinned block is not unmapped by anything but a close.
  for (const BlockId id : *ids) {
    const PageIndex page = geometry.page_of(id);
    if (held->generations_.empty() || held->generations_.back().first != page) {
      held->generations_.emplace_back(page, held->range_->generation(page));
    }
  }
  return held;
}

HeldBlocks::~HeldBlocks() {
  if (pool_->made_by().is_this()) release();  // in a forked child nothing of it is ours
}

bool HeldBlocks::is_whole() const {
  return std::all_of(generations_.begin(), generations_.end(), [&](const auto& each) {
    return range_->is_mapped(each.first) && range_->generation(each.first) == each.second;
  });
}

void HeldBlocks::release() {
  if (std::exchange(is_held_, false)) (void)pool_->allocator.unpin(ticket_);
}

}  // namespace kvelastic
