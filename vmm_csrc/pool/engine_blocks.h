// Blocks of memory that an engine owns: its KV tensors, wherever and in whatever order they lie.
//
//   part i of block b:   address_i + b * block_stride_i    rows_i rows, row_stride_i apart
//   record of a block:   [ part 0, its rows side by side | part 1 | ... ]
//
// Parts are named in the order that a record has. So a record is the same bytes whatever the order
// of layers, K and V, and blocks in the engine's tensors is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "driver/driver.h"
#include "pages/staging.h"
#include "pages/staging_window.h"

namespace kvelastic {

/// Where one part of every block lies.
struct BlockPart {
  std::byte* address;
  std::size_t block_stride_bytes;
  std::size_t row_bytes;
  std::size_t rows;
  std::size_t row_stride_bytes;
};

/// Thread-safe. Nothing is known of the memory but what the parts say: it is the caller's to keep
/// it, and to have nothing else write to a block while it is copied.
class EngineBlocks {
 public:
  /// Fails with kInvalidArgument for no parts, no blocks, a part without bytes, rows that overlap,
  /// and sizes that do not fit in memory.
  static Result<std::unique_ptr<EngineBlocks>> create(std::shared_ptr<Driver> driver,
                                                      std::vector<BlockPart> parts,
                                                      std::uint64_t blocks);
  ~EngineBlocks() { look_at(nullptr); }
  EngineBlocks(const EngineBlocks&) = delete;
  EngineBlocks& operator=(const EngineBlocks&) = delete;

  std::uint64_t blocks() const { return blocks_; }
  std::uint64_t record_bytes() const { return record_bytes_; }

  /// Copies blocks to or from their slots, each to `offset` of its record; blocks until all is
  /// there. Fails with kInvalidArgument for a block, a slot or an offset that is not there, nothing
  /// copied then; with kMapping as the driver's copy does.
  Status copy(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
              std::uint64_t offset_bytes, CopyTo to);

 private:
  EngineBlocks(std::shared_ptr<Driver> driver, std::vector<BlockPart> parts, std::uint64_t blocks,
               std::uint64_t record_bytes)
      : driver_(std::move(driver)),
        parts_(std::move(parts)),
        blocks_(blocks),
        record_bytes_(record_bytes) {}

  /// Keeps the staging that was used last pinned. Unpinned memory is copied as well, only slower.
  void look_at(std::shared_ptr<Staging> staging);

  const std::shared_ptr<Driver> driver_;
  const std::vector<BlockPart> parts_;
  const std::uint64_t blocks_;
  const std::uint64_t record_bytes_;
  std::mutex mutex_;  ///< of the two below; the driver's are taken under it
  std::shared_ptr<Staging> staging_;
  bool pinned_ = false;
};

}  // namespace kvelastic
