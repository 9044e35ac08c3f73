// A pool as tiers see it: bytes of blocks.
#include <string>

#include "pool.h"

namespace kvelastic {

Status Pool::copy_records(std::span<const BlockSlot> blocks,
                          const std::shared_ptr<Staging>& staging, CopyTo to) {
  if (staging->record_bytes() != record_bytes()) {
    return Error{Errc::kInvalidArgument,
                 "the staging is for records of " + std::to_string(staging->record_bytes()) +
                     " bytes, and a block has " + std::to_string(record_bytes())};
  }
  if (Status mine = staging->made_by().refuse_in_a_child(); !mine) return mine;
  for (const BlockSlot& block : blocks) {
    if (block.slot >= staging->slots()) {
      return Error{Errc::kInvalidArgument, "slot " + std::to_string(block.slot) +
                                               " is not one of the staging's " +
                                               std::to_string(staging->slots())};
    }
  }
  return pages_.copy_records(blocks, staging, to);
}

}  // namespace kvelastic
