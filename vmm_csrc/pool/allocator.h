// The engine's calls on a pool: it allocates and frees block ids, and waits for memory.
//
// An alloc takes blocks in this order: free blocks of mapped pages (best fit), parked pages, a new
// page within the limit, the oldest cached block. Over the limit it allocates no block of the
// emptiest pages, so that they can be released.
//
// free() and cache() only try to enter the session, so they never wait for it; the maintenance
// thread does the rest.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pool/grow.h"
#include "pool/pool_state.h"
#include "pool/reclaim.h"

namespace kvelastic {

class Allocator {
 public:
  Allocator(PoolState& pool, Grower& grower, Reclaimer& reclaimer)
      : pool_(pool), grower_(grower), reclaimer_(reclaimer) {}

  // --- blocks --------------------------------------------------------------------------------

  /// Returns `count` ids, or none if too few blocks are available; then nothing has changed. May
  /// map pages (blocks) and evict cached blocks (see take_changes). Fails only if no retry can
  /// succeed: kPoolFailed, kChannelClosed, kChannelTimeout. Every later alloc and ensure then
  /// fails, because the mappings are unknown. With `reuse`, an alloc that would need a new page
  /// uses freed blocks that are still pinned, but not strictly; see PoolState::reusable().
  Result<std::optional<std::vector<BlockId>>> alloc(std::uint64_t count, bool reuse = false);
  /// Allocates all blocks of `pages` consecutive pages. free() takes them page by page or together.
  /// For pools that hand out whole pages. Otherwise as alloc(); blocks.
  Result<std::optional<std::vector<BlockId>>> alloc_run(std::uint64_t pages);
  /// alloc() for a caller that must not block. Returns false, with nothing changed, if getting a
  /// page could take time; otherwise true, with `out` set to the result.
  bool try_alloc(std::uint64_t count, std::optional<std::vector<BlockId>>& out, bool reuse = false);

  /// used or cached -> free. All or nothing; fails with kUnknownBlock, kNullBlock, kDoubleFree.
  /// Over the limit it unmaps the emptied pages before it returns (blocks). The maintenance thread
  /// does that instead, if another thread is in a session, or if a GPU's kernels would have to be
  /// waited for.
  Status free(std::span<const BlockId> ids);
  /// used -> cached; earlier `ids` are evicted earlier. Fails as free(). Evicts at once beyond
  /// max_cached_blocks. `keys`, if any, are the keys of the blocks: one each.
  Status cache(std::span<const BlockId> ids, std::span<const BlockKey> keys = {});
  /// cached -> used. All or nothing, fails as free(). The blocks may have been evicted: enter a
  /// session and call take_changes() first.
  Status touch(std::span<const BlockId> ids);

  /// Pins used or cached blocks for a reader. Until unpin() they are not evicted, moved or
  /// unmapped, and not allocated by an alloc without `reuse`, even if they are freed or cached, the
  /// pool sleeps, or its limit is lowered. A freed block counts as free only after its last pin.
  /// Pins are counted, and a freed block that is still pinned can be pinned again. All or nothing;
  /// fails with kUnknownBlock (also for a free block), kNullBlock, kDoubleFree (a reserved block).
  /// A cached block may have been evicted: enter a session and call take_changes() first.
  Result<PinTicket> pin(std::span<const BlockId> ids, PinKind kind);
  /// Ends a pin; blocks that were freed or cached in between are free or cached now. Over the limit
  /// it unmaps emptied pages as free() does (blocks). False: the pin has already ended, by unpin or
  /// by close(discard), and nothing changes.
  bool unpin(PinTicket ticket);

  /// Returns every eviction and move of a cached block since the last call, in order. The engine
  /// must forget the contents of evicted blocks before its next cache lookup. Usually empty: check
  /// PoolState::has_changes() first, one load.
  std::vector<BlockChange> take_changes();

  /// Frees every block and drops all reservations; ids allocated before are invalid. Pinned blocks
  /// become free when their pins end.
  void clear();

  // --- memory --------------------------------------------------------------------------------

  /// Maps pages within the limit until `count` blocks are free without an eviction; never evicts.
  /// Does nothing if `count` could not be available even with evictions. Returns
  /// available_mapped(). Blocks. In the caller's session it waits for others only while fewer than
  /// `needed` blocks are available, evictions included. Fails as alloc().
  Result<std::uint64_t> ensure(std::uint64_t count, std::uint64_t needed = 0);
  /// ensure() for a caller that must not block. Returns false, with nothing done, if a page might
  /// be available; otherwise true with `mapped` set.
  bool try_ensure(std::uint64_t count, std::uint64_t needed, std::uint64_t& mapped) const;

  /// Blocks until PoolState::epoch() differs from `seen`, at most for `timeout`, and returns it.
  /// While a thread waits here, the maintenance thread keeps requesting missing memory from others.
  std::uint32_t wait_for_epoch(std::uint32_t seen, std::chrono::nanoseconds timeout);

  /// Reserves `count` blocks for later allocs, which take them first. False: too few are available,
  /// or the pool is over its limit. A lower limit, sleep, or memory requests of others drop the
  /// whole reservation before any cached block is evicted. Blocks.
  Result<bool> try_to_reserve(std::uint64_t count);
  void free_reserved();

  /// Publishes how many requests wait for memory.
  WaitingBytes report_waiting(const Waiting& waiting);

 private:
  using Change = PoolState::Change;
  using Reach = Accounting::Reach;

  /// An alloc's blocks: `fresh` ones, and `reused` ones that are still pinned.
  struct Parts {
    std::uint64_t fresh, reused;
  };
  static Parts parts_of(const Accounting& accounting, std::uint64_t count, bool reuse);
  bool take_at_hand(State& state, Parts parts, std::vector<BlockId>& out);
  bool take_mapped(State& state, Parts parts, std::vector<BlockId>& out);
  void given_back(Change& change);

  PoolState& pool_;
  Grower& grower_;
  Reclaimer& reclaimer_;
};

}  // namespace kvelastic
