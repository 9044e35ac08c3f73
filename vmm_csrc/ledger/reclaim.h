// Which instance releases memory to which: pure functions over plain values, without clock, memory
// allocation or locks.
//
// An instance that cannot get a page makes a memory request. Other instances release memory in this
// order, lowest priority first and then most idle first, but never below their guarantee:
//
// clang-format off
//   step     memory                         released by
//   parked   pages that hold nothing        as `cached`, and at once by equals until the requester
//                                           has its fair share
//   cached   contents that no request uses  lower priorities; idle instances; all, if the requester
//                                           is below its guarantee; equals above their fair share,
//                                           once the requester has waited
//   in use   the instance refuses blocks    lower priorities; all, if the requester is below its
//            and its engine preempts        guarantee; equals above their fair share, after a
//                                           longer wait
// clang-format on
//
// A step begins only when all memory of the step before has been requested. Equals are instances of
// the same priority.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvelastic {

/// The deepest reclaim step that an instance is requested to take.
enum class Depth : std::uint32_t { kParked = 1, kCached = 2, kInUse = 3 };
inline constexpr std::size_t kDepths = 3;

/// The engine's report about its requests.
enum class Reported : std::uint32_t { kNothing = 0, kBusy = 1, kIdle = 2 };

/// A snapshot of one instance on a device.
struct Contender {
  std::uint64_t granted_bytes = 0;
  std::uint64_t min_bytes = 0;
  std::int64_t priority = 0;
  std::uint64_t parked_bytes = 0;
  std::uint64_t cached_bytes = 0;
  std::uint64_t page_bytes = 0;  ///< it releases multiples of this; 0: single bytes
  std::uint64_t idle_ns = 0;     ///< since its last alloc or free
  /// Whether the engine has unfinished requests; kNothing: derived from idle_ns.
  Reported reported = Reported::kNothing;
  std::uint64_t request_bytes = 0;  ///< its memory request; 0: none
  std::uint64_t request_ns = 0;     ///< how long it has waited
  /// Released memory is kept for its request. False: it first waits for another device and cannot
  /// use memory here yet (see device_set.h).
  bool keeps = true;
  std::uint64_t reclaim_bytes = 0;  ///< requested from it and still open
  std::uint64_t reclaim_ns =
      0;  ///< age of the oldest open request, or time since it last handled one
};

/// Timeouts of reclaim. Tests may set all of them.
struct ReclaimRules {
  /// An instance without a report is idle after this time without an alloc or free: others may take
  /// its cache.
  std::uint64_t idle_ns = 500'000'000;
  /// An instance that leaves a reclaim request open this long is skipped; the next one is used.
  std::uint64_t patience_ns = 20'000'000;
  /// A request this old may take cached contents of busy equals above their fair share.
  std::uint64_t fair_cached_ns = 300'000'000;
  /// A request this old may also take their blocks in use.
  std::uint64_t fair_in_use_ns = 2'000'000'000;
  /// A reserve, for example of a wake, fails if others have not released the memory by then.
  std::uint64_t reserve_wait_ns = 5'000'000'000;
  /// A memory request expires if it is not renewed for this long.
  std::uint64_t request_expiry_ns = 250'000'000;
};

/// A reclaim request to one instance.
struct ReclaimRequest {
  std::size_t contender;
  std::uint64_t bytes;
  Depth depth;
};

/// True if the instance requests memory or has work: by its engine's report, or without one by the
/// time since its last alloc or free.
bool is_busy(const Contender& c, const ReclaimRules& rules);

/// What each instance may keep when busy equals compete: the capacity divided by the instances that
/// work or request memory.
std::uint64_t fair_share_bytes(std::span<const Contender> all, std::uint64_t capacity_bytes,
                               const ReclaimRules& rules);

/// True if `a` is served before `b`: below its guarantee first, then higher priority, then lacking
/// at least a page of the fair share, then waiting longer. `b` may have no request (request_bytes
/// 0).
bool outranks(const Contender& a, const Contender& b, std::uint64_t fair_bytes);

/// How many released bytes `all[self]` must leave to waiting instances. An instance that outranks
/// it gets its whole request; if it outranks only by guarantee or share, only the missing part of
/// that. Without the share rule a page would alternate between equals: the instance with more
/// memory waits longer and would take it back.
std::uint64_t kept_bytes(std::span<const Contender> all, std::size_t self,
                         std::uint64_t capacity_bytes, const ReclaimRules& rules);

/// Plans the reclaim requests for `all[requester]` to get request_bytes beyond the `free_bytes`
/// already available to it. Memory requested earlier counts as on its way. The plan may cover less
/// than is missing if no other instance must release memory. Deterministic; the order is the order
/// of sending.
std::vector<ReclaimRequest> plan_reclaim(std::span<const Contender> all, std::size_t requester,
                                         std::uint64_t free_bytes, std::uint64_t capacity_bytes,
                                         const ReclaimRules& rules);

/// Plans requests that reduce the total by `excess_bytes`, as plan_reclaim for a requester that
/// outranks all. Guarantees and one page per instance are kept; pools do not release their last
/// page.
std::vector<ReclaimRequest> plan_excess(std::span<const Contender> all, std::uint64_t excess_bytes,
                                        std::uint64_t capacity_bytes, const ReclaimRules& rules);

/// True if an instance other than `all[self]` was requested to release memory, or released some,
/// within `patience_ns`.
bool is_memory_coming(std::span<const Contender> all, std::size_t self, std::uint64_t patience_ns);

/// Parked and cached bytes that others would have to release if `all[requester]` requested memory
/// now.
std::uint64_t reachable_bytes(std::span<const Contender> all, std::size_t requester,
                              std::uint64_t capacity_bytes, const ReclaimRules& rules);

}  // namespace kvelastic
