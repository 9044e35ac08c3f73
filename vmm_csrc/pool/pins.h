// Blocks that somebody reads although their user may have given them back: a step on its way, a
// copy, a transfer. Until its last pin ends such a block is not handed out, evicted, moved or
// unmapped, and what its user did with it meanwhile waits:
//
//   used -- pin --> used, pinned -- free --> waits to be free ----- last pin ends --> free
//                      |     ^  `-- cache --> waits to be cached -- last pin ends --> cached
//                      |     '------ touch ------'
//                      '-- last pin ends --> used
//
// Blocks are named by their dense index here. Blocks (blocks.h) owns this and keeps the bitmaps: to
// those a pinned block is used, whatever it waits for.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/lazy_array.h"
#include "base/status.h"
#include "pool/block_list.h"

namespace kvelastic {

/// What keeps whoever uses a pinned block next from disturbing its reader.
enum class PinKind : std::uint8_t {
  kStrict,   ///< nothing: the block is not used again until the pin ends
  kFenced,   ///< the engine waits for the reader first, which takes time
  kOrdered,  ///< both are work of one queue, in this order: a step and the next one
};

/// Names a pin; never that of another one.
using PinTicket = std::uint64_t;

class Pins {
 public:
  /// What a block is when its last pin has ended.
  enum class Then : std::uint8_t { kUsed, kFree, kCached };

  explicit Pins(BlockLinks& links)
      : waiting_{BlockList(links), BlockList(links), BlockList(links),
                 BlockList(links), BlockList(links), BlockList(links)} {}
  Status allocate(std::uint64_t blocks) { return entries_.allocate(blocks); }

  bool is_pinned(std::uint32_t block) const {
    return !tickets_.empty() && entries_[block].is_pinned();
  }
  /// Pre: is_pinned().
  Then then(std::uint32_t block) const { return entries_[block].then; }
  /// The block was given back, or is used again. Pre: is_pinned().
  void set_then(std::uint32_t block, Then then);

  PinTicket add(const std::vector<std::uint32_t>& blocks, PinKind kind);
  /// How many blocks a pin names; 0: it has ended.
  std::size_t blocks_of(PinTicket ticket) const {
    const auto found = tickets_.find(ticket);
    return found == tickets_.end() ? 0 : found->second.blocks.size();
  }
  /// Ends a pin; `released` is told of each block that has none left, and what it is now. False:
  /// it has ended before.
  template <typename F>
  bool end(PinTicket ticket, F released) {
    const auto found = tickets_.find(ticket);
    if (found == tickets_.end()) return false;
    const Pin pin = std::move(found->second);
    for (const std::uint32_t block : pin.blocks) {
      const Then then = entries_[block].then;
      if (remove(block, pin.kind)) released(block, then);
    }
    tickets_.erase(found);
    return true;
  }
  /// Ends all of them; what their blocks were waiting for is forgotten.
  void drop();

  /// How many blocks were given back and still are pinned.
  std::uint64_t waiting() const { return waiting_count_; }
  /// How many of them may be used again at once: those that nobody has pinned strictly.
  std::uint64_t reusable() const { return waiting() - strictly_waiting(); }
  /// Tells `see` of these, in the order to use them: ordered before fenced ones, those without
  /// contents before cached ones, the oldest first; until it answers false.
  template <typename F>
  void each_reusable(F see) const {
    for (std::size_t list = 0; list < 4; ++list) {
      for (std::uint32_t at = waiting_[list].oldest(); at != 0;) {
        const std::uint32_t next = waiting_[list].after(at);  // `see` may take this one out
        if (!see(at - 1)) return;
        at = next;
      }
    }
  }
  /// All that wait, or those that wait to be cached only.
  std::vector<std::uint32_t> waiting_blocks(bool cached_only = false) const;
  /// All that are pinned, each once.
  std::vector<std::uint32_t> pinned_blocks() const;

  /// Recounts from the tickets up; fails with kIntegrity.
  Status check_integrity() const;

 private:
  struct Entry {
    std::uint32_t strict, fenced, ordered;  // pins of each kind
    Then then;
    bool is_pinned() const { return strict + fenced + ordered > 0; }
    std::uint32_t& count(PinKind kind) {
      return kind == PinKind::kStrict ? strict : kind == PinKind::kFenced ? fenced : ordered;
    }
    /// Its place in waiting_. Pre: it waits.
    std::size_t list() const {
      const std::size_t kind = strict > 0 ? 2 : fenced > 0 ? 1 : 0;
      return 2 * kind + (then == Then::kCached ? 1 : 0);
    }
  };
  struct Pin {
    std::vector<std::uint32_t> blocks;
    PinKind kind;
  };

  void unlist(std::uint32_t block) {
    if (const Entry& entry = entries_[block]; entry.then != Then::kUsed) {
      waiting_[entry.list()].remove(block);
      --waiting_count_;
    }
  }
  void enlist(std::uint32_t block) {
    if (const Entry& entry = entries_[block]; entry.then != Then::kUsed) {
      waiting_[entry.list()].append(block);
      ++waiting_count_;
    }
  }
  bool remove(std::uint32_t block, PinKind kind);
  std::uint64_t strictly_waiting() const { return waiting_[4].size() + waiting_[5].size(); }

  LazyArray<Entry> entries_;
  std::array<BlockList, 6>
      waiting_;  // ordered, fenced, strict; of each those without contents first
  std::uint64_t waiting_count_ = 0;
  std::unordered_map<PinTicket, Pin> tickets_;
  PinTicket newest_ = 0;
};

}  // namespace kvelastic
