// Blocks of a pool that a copy by others touches: pinned until it is over, and compared then.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/memory_pieces.h"
#include "pages/geometry.h"
#include "pages/range.h"
#include "pool/pool.h"

namespace kvelastic {

/// The ids of the blocks that pieces of a range belong to, each once, in ascending order.
///
///     page     | slice 0: blocks_per_page blocks | slice 1 | ... | padding |
///     address  = base + extent * extent_stride + (slice * blocks_per_page + id) * block_bytes
///
/// Takes time and memory for each block of each piece: the caller bounds their bytes. Fails with
/// kInvalidArgument for bytes where no block lies. Pre: geometry.check().
Result<std::vector<BlockId>> blocks_in(const Geometry& geometry, std::uint64_t base,
                                       std::span<const Piece> pieces);

/// Any thread, one at a time.
class HeldBlocks {
 public:
  /// Pins the blocks that the pieces belong to. Fails as blocks_in and Allocator::pin.
  /// Pre: the pool's memory is the range.
  static Result<std::unique_ptr<HeldBlocks>> hold(std::shared_ptr<Range> range,
                                                  std::shared_ptr<Pool> pool,
                                                  std::span<const Piece> pieces);
  HeldBlocks(const HeldBlocks&) = delete;
  HeldBlocks& operator=(const HeldBlocks&) = delete;
  ~HeldBlocks();

  /// Whether every page has been there all the time.
  bool is_whole() const;

  /// Ends the pin. May block as Allocator::unpin. Safe to repeat.
  void release();

 private:
  HeldBlocks(std::shared_ptr<Range> range, std::shared_ptr<Pool> pool, PinTicket ticket)
      : range_(std::move(range)), pool_(std::move(pool)), ticket_(ticket) {}

  const std::shared_ptr<Range> range_;
  const std::shared_ptr<Pool> pool_;
  const PinTicket ticket_;
  bool is_held_ = true;
  std::vector<std::pair<PageIndex, std::uint32_t>> generations_;
};

}  // namespace kvelastic
