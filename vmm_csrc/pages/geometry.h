// Maps block ids to pages, and pages to addresses of a range. kvelastic/pool/layout.py computes
// these numbers; this is the same arithmetic for native code.
//
//
// Paged layout, one extent per page (n buffers of B blocks, contiguous):
//     |<------------ extent_bytes ------------>|
//     [pad][ buffer 0: B blocks ] ... [ n-1 ]..[pad][ buffer 0 ...
//     page 0                                   page 1
// Per-buffer layout, n extents per page, one in each buffer's part of the range:
//     [ p0 ][ p1 ][ p2 ] ...   [ p0 ][ p1 ][ p2 ] ...
//     buffer 0                 buffer 1, at extent_stride_bytes
//
// The first id of page p is ceil(p * extent_bytes / block_bytes), so an extent need not be a
// multiple of a block. This loses at most one block's bytes per page (the [pad] on the left).
#pragma once

#include <cstdint>
#include <numeric>
#include <string>

#include "base/status.h"

namespace kvelastic {

using PageIndex = std::uint32_t;
using BlockId = std::int64_t;

/// A copy of one block's contents to another block.
struct BlockMove {
  BlockId from, to;
};

struct Geometry {
  std::uint64_t pages = 0;                ///< capacity of the range in pages
  std::uint64_t extents_per_page = 1;     ///< driver handles per page
  std::uint64_t extent_bytes = 0;         ///< bytes of one handle
  std::uint64_t extent_stride_bytes = 0;  ///< distance between consecutive extents of a page
  std::uint64_t block_bytes = 0;          ///< bytes of one block in one buffer
  std::uint64_t blocks_per_page = 0;      ///< block ids per page
  std::uint64_t buffers_per_extent = 1;   ///< slices of blocks_per_page blocks in an extent

  std::uint64_t page_bytes() const { return extents_per_page * extent_bytes; }
  std::uint64_t range_bytes() const {
    return extents_per_page == 1
               ? pages * extent_bytes
               : (extents_per_page - 1) * extent_stride_bytes + pages * extent_bytes;
  }
  std::uint64_t extent_offset(PageIndex page, std::uint64_t extent) const {
    return extent * extent_stride_bytes + page * extent_bytes;
  }
  BlockId first_id(PageIndex page) const {
    return static_cast<BlockId>((page * extent_bytes + block_bytes - 1) / block_bytes);
  }

  /// The offset of a block in one slice of one extent of its page.
  std::uint64_t block_offset(BlockId id, std::uint64_t extent, std::uint64_t slice) const {
    return extent * extent_stride_bytes +
           (slice * blocks_per_page + static_cast<std::uint64_t>(id)) * block_bytes;
  }
  /// Bytes of one block in all buffers.
  std::uint64_t record_bytes() const { return extents_per_page * buffers_per_extent * block_bytes; }
  /// The page of an id. Does not check that the id is valid.
  PageIndex page_of(BlockId id) const {
    return static_cast<PageIndex>(static_cast<std::uint64_t>(id) * block_bytes / extent_bytes);
  }

  /// Fails with kInvalidArgument, naming the number. After success no sum or product of the
  /// numbers overflows, none is a zero divisor, and no block exceeds its page.
  Status check(std::uint64_t granularity_bytes) const {
    constexpr std::uint64_t kMaxPages = std::uint64_t{1} << 31;
    constexpr std::uint64_t kMaxBlocksPerPage = std::uint64_t{1} << 20;
    constexpr std::uint64_t kMaxRangeBytes = std::uint64_t{1} << 60;
    const auto refuse = [](const char* what, std::uint64_t value, const std::string& accepted) {
      return Status(
          Error{Errc::kInvalidArgument,
                std::string(what) + " is " + std::to_string(value) + ", must be " + accepted});
    };
    if (pages == 0 || pages > kMaxPages) return refuse("pages", pages, "1 to 2^31");
    if (block_bytes == 0) return refuse("block_bytes", block_bytes, "at least 1");
    if (extents_per_page == 0) return refuse("extents_per_page", extents_per_page, "at least 1");
    if (extent_bytes == 0 || extent_bytes % granularity_bytes != 0) {
      return refuse("extent_bytes", extent_bytes,
                    "a multiple of " + std::to_string(granularity_bytes));
    }
    if (extent_bytes > kMaxRangeBytes / pages) {
      return refuse("extent_bytes", extent_bytes, "at most 2^60 divided by the pages");
    }
    if (block_bytes > extent_bytes) {
      return refuse("block_bytes", block_bytes,
                    "at most the " + std::to_string(extent_bytes) + " bytes of an extent");
    }
    // A page that begins inside a block may lose this much on its left (see above).
    const std::uint64_t skipped = block_bytes - std::gcd(extent_bytes, block_bytes);
    const std::uint64_t most = (extent_bytes - skipped) / block_bytes;
    if (blocks_per_page == 0 || blocks_per_page > kMaxBlocksPerPage || blocks_per_page > most) {
      return refuse("blocks_per_page", blocks_per_page, "1 to " + std::to_string(most));
    }
    if (buffers_per_extent == 0 || buffers_per_extent > most / blocks_per_page) {
      return refuse("buffers_per_extent", buffers_per_extent,
                    "1 to " + std::to_string(most / blocks_per_page));
    }
    if (pages * blocks_per_page >= (std::uint64_t{1} << 32) - 1) {
      return refuse("blocks of the range", pages * blocks_per_page, "under 2^32");
    }
    if (extents_per_page > 1 && (extent_stride_bytes % granularity_bytes != 0 ||
                                 extent_stride_bytes < pages * extent_bytes)) {
      return refuse("extent_stride_bytes", extent_stride_bytes,
                    "a multiple of the granularity that no extent overlaps");
    }
    if (extents_per_page > 1 && extents_per_page > kMaxRangeBytes / extent_stride_bytes) {
      return refuse("extents_per_page", extents_per_page, "at most 2^60 divided by their stride");
    }
    return ok();
  }
};

}  // namespace kvelastic
