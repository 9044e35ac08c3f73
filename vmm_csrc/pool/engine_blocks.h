// Blocks in memory that an engine owns: its KV tensors, in any layout.
//
//   part i of block b:   address_i + b * block_stride_i    rows_i rows, row_stride_i apart
//   object of a block:   [ part 0, its rows contiguous | part 1 | ... ]
//
// The order of the parts defines the object. An object therefore has the same bytes whatever the
// order of layers, K and V, and blocks in the engine's tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/own_process.h"
#include "base/status.h"
#include "driver/driver.h"
#include "pages/staging.h"
#include "pages/staging_window.h"

namespace kvelastic {

/// The location of one part of every block.
struct BlockPart {
  std::byte* address;
  std::size_t block_stride_bytes;
  std::size_t row_bytes;
  std::size_t rows;
  std::size_t row_stride_bytes;
};

/// Thread-safe. The caller keeps the memory alive and makes sure that a block is not written while
/// it is copied.
class EngineBlocks {
 public:
  /// Fails with kInvalidArgument for no parts, no blocks, an empty part, overlapping rows, or sizes
  /// that exceed memory.
  static Result<std::unique_ptr<EngineBlocks>> create(std::shared_ptr<Driver> driver,
                                                      std::vector<BlockPart> parts,
                                                      std::uint64_t blocks);
  ~EngineBlocks() {
    if (made_by_.is_this()) look_at(nullptr);
  }
  EngineBlocks(const EngineBlocks&) = delete;
  EngineBlocks& operator=(const EngineBlocks&) = delete;

  std::uint64_t blocks() const { return blocks_; }
  std::uint64_t record_bytes() const { return record_bytes_; }

  /// Copies blocks to or from their slots, each at `offset_bytes` of its object. Blocks until the
  /// copy is complete. Fails with kInvalidArgument for an invalid block, slot or offset (nothing is
  /// copied then), and with kMapping as the driver's copy.
  Status copy(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
              std::uint64_t offset_bytes, CopyTo to);

 private:
  EngineBlocks(std::shared_ptr<Driver> driver, std::vector<BlockPart> parts, std::uint64_t blocks,
               std::uint64_t record_bytes)
      : driver_(std::move(driver)),
        parts_(std::move(parts)),
        blocks_(blocks),
        record_bytes_(record_bytes) {}

  /// Keeps the last used staging pinned. Copies from unpinned memory work too, only slower.
  void look_at(std::shared_ptr<Staging> staging);

  const OwnProcess made_by_;
  const std::shared_ptr<Driver> driver_;
  const std::vector<BlockPart> parts_;
  const std::uint64_t blocks_;
  const std::uint64_t record_bytes_;
  std::mutex mutex_;  ///< guards the two below; the driver's locks are taken under it
  std::shared_ptr<Staging> staging_;
  bool pinned_ = false;
};

}  // namespace kvelastic
