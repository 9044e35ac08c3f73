#include "pool/engine_blocks.h"

#include <string>
#include <utility>

namespace kvelastic {
namespace {

constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;  // as for a staging

Error refuse(std::string what) {
  return {Errc::kInvalidArgument, std::move(what)};
}

/// a * b, or kMostBytes + 1 if the product exceeds kMostBytes.
std::uint64_t product(std::uint64_t a, std::uint64_t b) {
  std::uint64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? kMostBytes + 1 : result;
}

}  // namespace

Result<std::unique_ptr<EngineBlocks>> EngineBlocks::create(std::shared_ptr<Driver> driver,
                                                           std::vector<BlockPart> parts,
                                                           std::uint64_t blocks) {
  if (parts.empty() || blocks == 0) return refuse("tensors without parts, or without blocks");
  std::uint64_t record_bytes = 0;
  for (const BlockPart& part : parts) {
    if (part.address == nullptr || part.row_bytes == 0 || part.rows == 0) {
      return refuse("a part of a block without an address, without rows or of empty rows");
    }
    if (part.rows > 1 && part.row_stride_bytes < part.row_bytes) {
      return refuse("rows of " + std::to_string(part.row_bytes) + " bytes that begin " +
                    std::to_string(part.row_stride_bytes) + " apart overlap");
    }
    const std::uint64_t bytes = product(part.rows, part.row_bytes);
    const std::uint64_t reach = product(blocks, part.block_stride_bytes);
    record_bytes += bytes;
    if (bytes > kMostBytes || reach > kMostBytes || record_bytes > kMostBytes ||
        product(part.rows, part.row_stride_bytes) > kMostBytes) {
      return refuse("tensors of more than 2^46 bytes");
    }
  }
  return std::unique_ptr<EngineBlocks>(
      new EngineBlocks(std::move(driver), std::move(parts), blocks, record_bytes));
}

Status EngineBlocks::copy(std::span<const BlockSlot> blocks,
                          const std::shared_ptr<Staging>& staging, std::uint64_t offset_bytes,
                          CopyTo to) {
  if (Status mine = staging->made_by().refuse_in_a_child(); !mine) return mine;
  if (offset_bytes > staging->record_bytes() ||
      staging->record_bytes() - offset_bytes < record_bytes_) {
    return refuse("a record of " + std::to_string(staging->record_bytes()) +
                  " bytes has no room for " + std::to_string(record_bytes_) + " from byte " +
                  std::to_string(offset_bytes) + " on");
  }
  std::vector<HostCopy> copies;
  copies.reserve(blocks.size() * parts_.size());
  for (const BlockSlot& block : blocks) {
    if (block.id < 0 || static_cast<std::uint64_t>(block.id) >= blocks_) {
      return refuse("block " + std::to_string(block.id) + " is not one of the engine's " +
                    std::to_string(blocks_));
    }
    if (block.slot >= staging->slots()) {
      return refuse("slot " + std::to_string(block.slot) + " is not one of the staging's " +
                    std::to_string(staging->slots()));
    }
    std::byte* record = staging->record(block.slot).data() + offset_bytes;
    for (const BlockPart& part : parts_) {
      copies.push_back(
          {part.address + static_cast<std::uint64_t>(block.id) * part.block_stride_bytes, record,
           part.row_bytes, part.rows, part.rows > 1 ? part.row_stride_bytes : part.row_bytes});
      record += part.rows * part.row_bytes;
    }
  }
  look_at(staging);
  return driver_->copy_host(copies, to);
}

void EngineBlocks::look_at(std::shared_ptr<Staging> staging) {
  const std::lock_guard lock(mutex_);
  if (staging == staging_) return;
  if (staging_ && pinned_) driver_->unpin_host(staging_->memory());
  staging_ = std::move(staging);
  pinned_ = staging_ && driver_->pin_host(staging_->memory());
}

}  // namespace kvelastic
