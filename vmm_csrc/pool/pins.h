// Pins: blocks that are being read (by a step in progress, a copy or a transfer) even if their
// owner frees them. Until its last pin ends, a block is not allocated, evicted, moved or unmapped,
// and the owner's changes wait:
//
//   used -- pin --> used, pinned -- free --> waits to be free ----- last pin ends --> free
//                      |     ^  `-- cache --> waits to be cached -- last pin ends --> cached
//                      |     '------ touch ------'
//                      '-- last pin ends --> used
//
// Blocks are identified by their dense index. Blocks (blocks.h) owns this object and the bitmaps,
// in which a pinned block is always used.
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

/// What protects the reader of a pinned block if the block is allocated again.
enum class PinKind : std::uint8_t {
  kStrict,   ///< nothing: the block must not be allocated before the pin ends
  kFenced,   ///< the engine first waits for the reader, which takes time
  kOrdered,  ///< both are work of one queue in this order, for example consecutive steps
};

/// Identifies a pin; never reused.
using PinTicket = std::uint64_t;

class Pins {
 public:
  /// A block's state when its last pin has ended.
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
  /// Sets the block's later state: it was freed, cached, or is used again. Pre: is_pinned().
  void set_then(std::uint32_t block, Then then);

  PinTicket add(const std::vector<std::uint32_t>& blocks, PinKind kind);
  /// The number of blocks of a pin; 0: it has ended.
  std::size_t blocks_of(PinTicket ticket) const {
    const auto found = tickets_.find(ticket);
    return found == tickets_.end() ? 0 : found->second.blocks.size();
  }
  /// Ends a pin. Calls `released` for each block without further pins, with its new state. False:
  /// the pin has already ended.
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
  /// Ends all pins and discards the waiting states.
  void drop();

  /// Blocks that were freed or cached and are still pinned.
  std::uint64_t waiting() const { return waiting_count_; }
  /// Waiting blocks that may be allocated at once: those without a strict pin.
  std::uint64_t reusable() const { return waiting() - strictly_waiting(); }
  /// Calls `see` for the reusable blocks until it returns false. Order: ordered before fenced,
  /// blocks without contents before cached ones, oldest first.
  template <typename F>
  void each_reusable(F see) const {
    for (std::size_t list = 0; list < 4; ++list) {
      for (std::uint32_t at = waiting_[list].oldest(); at != 0;) {
        const std::uint32_t next = waiting_[list].after(at);  // `see` may remove this one
        if (!see(at - 1)) return;
        at = next;
      }
    }
  }
  /// All waiting blocks, or only the ones to be cached.
  std::vector<std::uint32_t> waiting_blocks(bool cached_only = false) const;
  /// All pinned blocks, each once.
  std::vector<std::uint32_t> pinned_blocks() const;

  /// Recounts from the tickets. Fails with kIntegrity.
  Status check_integrity() const;

 private:
  struct Entry {
    std::uint32_t strict, fenced, ordered;  // pins of each kind
    Then then;
    bool is_pinned() const { return strict + fenced + ordered > 0; }
    std::uint32_t& count(PinKind kind) {
      return kind == PinKind::kStrict ? strict : kind == PinKind::kFenced ? fenced : ordered;
    }
    /// Its index in waiting_. Pre: it waits.
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
      waiting_;  // ordered, fenced, strict; of each kind, blocks without contents first
  std::uint64_t waiting_count_ = 0;
  std::unordered_map<PinTicket, Pin> tickets_;
  PinTicket newest_ = 0;
};

}  // namespace kvelastic
