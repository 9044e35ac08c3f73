#include "pool/pins.h"

#include <algorithm>
#include <map>
#include <string>

namespace kvelastic {

void Pins::set_then(std::uint32_t block, Then then) {
  unlist(block);
  entries_[block].then = then;
  enlist(block);
}

PinTicket Pins::add(const std::vector<std::uint32_t>& blocks, PinKind kind) {
  tickets_.emplace(newest_ + 1, Pin{blocks, kind});
  ++newest_;
  for (const std::uint32_t block : blocks) {
    unlist(block);
    ++entries_[block].count(kind);
    enlist(block);
  }
  return newest_;
}

/// Removes a pin; returns true if it was the block's last one. Its entry is empty then.
bool Pins::remove(std::uint32_t block, PinKind kind) {
  unlist(block);
  Entry& entry = entries_[block];
  --entry.count(kind);
  if (!entry.is_pinned()) {
    entry.then = Then::kUsed;
    return true;
  }
  enlist(block);
  return false;
}

void Pins::drop() {
  for (const auto& [ticket, pin] : tickets_) {
    for (const std::uint32_t block : pin.blocks) (void)remove(block, pin.kind);
  }
  tickets_.clear();
}

std::vector<std::uint32_t> Pins::waiting_blocks(bool cached_only) const {
  std::vector<std::uint32_t> blocks;
  for (std::size_t list = cached_only ? 1 : 0; list < waiting_.size();
       list += cached_only ? 2 : 1) {
    for (std::uint32_t at = waiting_[list].oldest(); at != 0; at = waiting_[list].after(at)) {
      blocks.push_back(at - 1);
    }
  }
  return blocks;
}

std::vector<std::uint32_t> Pins::pinned_blocks() const {
  std::vector<std::uint32_t> blocks;
  for (const auto& [ticket, pin] : tickets_) {
    blocks.insert(blocks.end(), pin.blocks.begin(), pin.blocks.end());
  }
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  return blocks;
}

Status Pins::check_integrity() const {
  const auto broken = [](std::string what) { return Status(Error{Errc::kIntegrity, what}); };
  std::map<std::uint32_t, Entry> counted;
  for (const auto& [ticket, pin] : tickets_) {
    for (const std::uint32_t block : pin.blocks) ++counted[block].count(pin.kind);
  }
  std::uint64_t waiting_here = 0;
  for (const auto& [block, count] : counted) {
    const Entry& entry = entries_[block];
    if (count.strict != entry.strict || count.fenced != entry.fenced ||
        count.ordered != entry.ordered) {
      return broken("the pins of the block at " + std::to_string(block) +
                    " are not those of the tickets");
    }
    waiting_here += entry.then != Then::kUsed ? 1 : 0;
  }
  std::uint64_t listed = 0;
  for (std::size_t list = 0; list < waiting_.size(); ++list) {
    std::uint64_t here = 0;
    for (std::uint32_t at = waiting_[list].oldest(); at != 0 && here <= waiting_[list].size();
         at = waiting_[list].after(at)) {
      ++here;
      if (!counted.contains(at - 1) || entries_[at - 1].list() != list) {
        return broken("the block at " + std::to_string(at - 1) + " waits in the wrong list");
      }
    }
    if (here != waiting_[list].size()) return broken("a list of pinned blocks is not whole");
    listed += here;
  }
  if (listed != waiting_here || listed != waiting_count_) {
    return broken(std::to_string(waiting_here) + " pinned blocks wait, " + std::to_string(listed) +
                  " are listed");
  }
  return ok();
}

}  // namespace kvelastic
