// `kvelastic._vmm`: the pool, its maintenance thread, and the ring to worker processes.
#include "pool/pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <tuple>
#include <utility>
#include <variant>

#include "bind/control_block.h"
#include "bind/errors.h"
#include "bind/ids.h"
#include "bind/pool_tiers.h"
#include "pool/maintenance_thread.h"
#include "segment/ring_backing.h"
#include "segment/ring_worker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

constexpr double kNanosecondsPerSecond = 1e9;

/// Converts seconds from Python. Negative or more than 1e9 s: without a limit.
std::chrono::nanoseconds duration(double seconds) {
  if (std::isnan(seconds)) raise_code("INVALID_ARGUMENT", "a time in seconds cannot be nan");
  if (seconds < 0 || seconds > 1e9) return kForever;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * kNanosecondsPerSecond));
}

/// How long a wake waits for others to release the reserve.
std::chrono::nanoseconds reserve_wait() {
  return std::chrono::nanoseconds(ReclaimRules{}.reserve_wait_ns);
}

/// The ring area of a segment, and the hold that keeps it mapped.
std::pair<std::span<std::byte>, std::shared_ptr<BufferHold>> ring_area(
    const PyControlBlock& control_block) {
  std::shared_ptr<BufferHold> hold = control_block.hold();
  if (hold->readonly()) raise_code("SEGMENT", "a ring needs a segment opened for writing");
  const ControlBlockHeader& header = control_block.view().header();
  return {hold->bytes().subspan(header.ring_offset, header.ring_bytes), hold};
}

using Memory = std::variant<std::shared_ptr<Range>, std::shared_ptr<RingBacking>>;

std::shared_ptr<Pool> make_pool(nb::typed<nb::handle, Memory> memory, std::uint64_t max_blocks,
                                std::uint64_t limit_bytes, std::uint64_t capacity_bytes,
                                std::uint64_t min_reserved_pages, std::uint64_t max_reserved_pages,
                                std::int64_t max_cached_blocks, double cache_idle_s,
                                bool preallocate, std::shared_ptr<DeviceSet> device_set,
                                double reclaim_wait_s, bool movable) {
  PoolOptions options;
  options.max_blocks = max_blocks;
  options.limit_bytes = limit_bytes;
  options.capacity_bytes = capacity_bytes;
  options.min_reserved_pages = min_reserved_pages;
  options.max_reserved_pages = max_reserved_pages;
  options.max_cached_blocks = max_cached_blocks;
  const std::chrono::nanoseconds cache_idle = duration(cache_idle_s);
  if (cache_idle != kForever) {
    // Blocks are stamped with milliseconds modulo 2^32.
    constexpr std::chrono::milliseconds kMost(std::int64_t{1} << 30);
    options.cache_idle =
        std::min(std::chrono::duration_cast<std::chrono::milliseconds>(cache_idle), kMost);
  }
  options.preallocate = preallocate;
  options.movable = movable;
  options.reclaim_wait = duration(reclaim_wait_s);
  if (nb::isinstance<Range>(memory)) {
    const auto range = nb::cast<std::shared_ptr<Range>>(memory);
    return unwrap(Pool::create(range->geometry(), std::make_shared<LocalBacking>(range), options,
                               std::move(device_set)));
  }
  std::shared_ptr<RingBacking> ring;
  if (!nb::try_cast(memory, ring) || ring == nullptr) {
    throw nb::type_error("memory must be a Range or a Ring");
  }
  return unwrap(Pool::create(ring->geometry(), ring, options, std::move(device_set)));
}

std::optional<IntegerList> alloc(Pool& pool, std::uint64_t count, bool reuse) {
  std::optional<std::vector<BlockId>> ids;
  // The common case maps no page and is short. Releasing the GIL there would cost far more: another
  // thread could keep it for up to 5 ms and delay the engine's step.
  if (!in_owner(pool).allocator.try_alloc(count, ids, reuse)) {
    ids = unwrap(without_gil([&] { return pool.allocator.alloc(count, reuse); }));
  }
  if (!ids) return std::nullopt;
  return list_of(*ids);
}

std::optional<IntegerList> alloc_run(Pool& pool, std::uint64_t pages) {
  in_owner(pool);
  const std::optional<std::vector<BlockId>> ids =
      unwrap(without_gil([&] { return pool.allocator.alloc_run(pages); }));
  if (!ids) return std::nullopt;
  return list_of(*ids);
}

/// Returns a value that PoolState publishes without a lock.
template <auto method>
auto from_state(const Pool& pool) {
  return (pool.state.*method)();
}

using Callback = nb::typed<nb::callable, void()>;

/// A session as a context manager. Native, because Python can run a signal handler between the
/// return of a call and the `try` that follows it; a session left open would block every other
/// thread.
class PySession {
 public:
  PySession(std::shared_ptr<Pool> pool, std::optional<Callback> begun)
      : pool_(std::move(pool)), begun_(std::move(begun)) {}

  void enter() const {
    Session& session = in_owner(*pool_).state.session;
    if (!session.try_lock()) without_gil([&] { session.lock(); });
    if (!begun_) return;
    try {
      (*begun_)();
    } catch (...) {
      session.unlock();
      throw;
    }
  }

  void exit() const {
    Session& session = in_owner(*pool_).state.session;
    if (!session.is_mine()) {
      raise_code("INVALID_ARGUMENT", "this thread has no session that could end");
    }
    session.unlock();
  }

 private:
  std::shared_ptr<Pool> pool_;
  std::optional<Callback> begun_;
};

void report_busy(Pool& pool, bool busy) {
  if (in_owner(pool).state.device_set) pool.state.device_set->report_busy(busy);
}

/// free and touch block only if the pool is over its limit and must unmap pages.
template <Status (Allocator::*method)(std::span<const BlockId>)>
void with_ids(Pool& pool, Integers sequence) {
  const std::vector<std::int64_t> ids = integers_of(sequence);
  if (in_owner(pool).state.is_over_limit()) {
    check(without_gil([&] { return (pool.allocator.*method)(ids); }));
  } else {
    check((pool.allocator.*method)(ids));
  }
}

std::vector<BlockId> pinned(const PoolState& pool, bool strict) {
  const PoolState::Look state(pool);
  return state->accounting.blocks().waiting_ids(strict);
}

PinKind pin_kind(std::string_view name) {
  if (name == "strict") return PinKind::kStrict;
  if (name == "fenced") return PinKind::kFenced;
  if (name == "ordered") return PinKind::kOrdered;
  raise_code("INVALID_ARGUMENT", "a pin is strict, fenced or ordered, not " + std::string(name));
}

/// Like free, it blocks only if the pool is over its limit and must unmap pages.
bool unpin(Pool& pool, PinTicket ticket) {
  if (!in_owner(pool).state.is_over_limit()) return pool.allocator.unpin(ticket);
  return without_gil([&] { return pool.allocator.unpin(ticket); });
}

Fields limit_dict(const LimitState& state) {
  nb::dict out;
  out["state"] = state.over_bytes == 0 ? "applied" : "shrinking";
  out["limit_bytes"] = state.limit_bytes;
  out["effective_limit_bytes"] = state.effective_bytes;
  out["mapped_bytes"] = state.mapped_bytes;
  out["over_bytes"] = state.over_bytes;
  return out;
}

Fields set_limit(Pool& pool, std::uint64_t limit_bytes) {
  in_owner(pool);
  return limit_dict(unwrap(without_gil([&] {
    (void)pool.limits.set(limit_bytes);
    return pool.limits.enforce();
  })));
}

Counts stats_dict(const Pool& pool) {
  const PoolStats stats = in_owner(pool).state.stats();
  nb::dict out;
  out["page_bytes"] = stats.page_bytes;
  out["pages_total"] = stats.pages_total;
  out["pages_limit"] = stats.pages_limit;
  out["pages_mapped"] = stats.pages_mapped;
  out["pages_parked"] = stats.pages_parked;
  out["blocks_total"] = stats.blocks_total;
  out["blocks_used"] = stats.blocks_used;
  out["blocks_cached"] = stats.blocks_cached;
  out["blocks_reserved"] = stats.blocks_reserved;
  out["blocks_pinned"] = stats.blocks_pinned;
  out["blocks_available"] = stats.blocks_available;
  out["allocs"] = stats.allocs;
  out["frees"] = stats.frees;
  out["alloc_failures"] = stats.alloc_failures;
  out["blocks_evicted"] = stats.blocks_evicted;
  out["blocks_moved"] = stats.blocks_moved;
  out["blocks_clean"] = stats.blocks_clean;
  out["blocks_under_writeback"] = stats.blocks_under_writeback;
  out["blocks_demoted"] = stats.blocks_demoted;
  out["blocks_dropped"] = stats.blocks_dropped;
  out["pages_mapped_ever"] = stats.pages_mapped_ever;
  out["pages_unmapped_ever"] = stats.pages_unmapped_ever;
  out["provision_runs"] = stats.provision_runs;
  return out;
}

nb::typed<nb::dict, PageIndex, std::uint64_t> occupancy(const Pool& pool,
                                                        std::optional<Integers> pages) {
  const PoolState& state = in_owner(pool).state;
  const auto occupancy_of = [&](PageIndex page) {
    return PoolState::Look(state)->accounting.blocks().occupancy(page);
  };
  nb::dict out;
  if (pages) {
    for (const std::uint32_t page : pages_of(*pages)) {
      if (const auto count = occupancy_of(page)) out[nb::int_(page)] = *count;
    }
    return out;
  }
  for (PageIndex page = 0; page < pool.state.geometry.pages; ++page) {
    if (const auto count = occupancy_of(page)) out[nb::int_(page)] = *count;
  }
  return out;
}

void bind_ring(nb::module_& m) {
  nb::class_<RingBacking>(m, "Ring",
                          "The scheduler's end of the ring to its worker processes. Any thread.")
      .def_static(
          "create",
          [](const PyControlBlock& control_block, const Geometry& geometry, double timeout_s,
             std::size_t ranks) {
            auto [area, hold] = ring_area(control_block);
            return std::shared_ptr<RingBacking>(
                unwrap(RingBacking::create(area, geometry, ranks, duration(timeout_s), hold)));
          },
          "control_block"_a, "geometry"_a, "timeout_s"_a, "ranks"_a = 1,
          "Write an empty ring for `ranks` workers into a segment. A command waits at most "
          "`timeout_s` seconds for its acknowledgement (negative: without a limit).")
      .def(
          "wait_for_workers",
          [](RingBacking& ring, double timeout_s) {
            check(without_gil([&] { return ring.wait_for_workers(duration(timeout_s)); }));
          },
          "timeout_s"_a, "Block until every rank has a worker. Raises ChannelTimeoutError.")
      .def(
          "ping", [](RingBacking& ring) { check(without_gil([&] { return ring.ping(); })); },
          "Send every worker an empty command and block until all have acknowledged it. Raises "
          "ChannelError.")
      .def_prop_ro(
          "has_live_processes", [](const RingBacking& ring) { return ring.has_live_processes(); },
          "True if another process has been a worker and is alive.")
      .def_prop_ro(
          "workers", [](const RingBacking& ring) { return ring.workers(); },
          "(pid, start time in ticks) of each rank's process; (0, 0) if it is not attached yet.")
      .def_prop_ro("geometry", &RingBacking::geometry);

  nb::class_<RingWorker>(m, "RingWorker",
                         "The worker's end of a ring: a native thread that executes the "
                         "scheduler's commands to map and unmap pages.")
      .def_static(
          "start",
          [](const PyControlBlock& control_block, std::shared_ptr<Range> range, std::size_t rank) {
            auto [area, hold] = ring_area(control_block);
            return std::shared_ptr<RingWorker>(
                unwrap(RingWorker::start(area, std::move(range), rank, hold)));
          },
          "control_block"_a, "range"_a, "rank"_a = 0,
          "Serve the segment's ring as `rank`, with the pages of `range`, until stop().")
      .def("stop", [](RingWorker& worker) { without_gil([&] { worker.stop(); }); });
}

}  // namespace

void bind_pool(nb::module_& m) {
  bind_ring(m);

  nb::class_<PySession>(m, "Session", "What Pool.session() returns.")
      .def("__enter__", &PySession::enter)
      .def(
          "__exit__", [](const PySession& session, const nb::args&) { session.exit(); },
          nb::sig("def __exit__(self, *args: object) -> None"),
          "Raises InvalidArgumentError if this thread is in no session.");

  nb::class_<Pool> pool(m, "Pool",
                        "Allocates blocks from the pages of a Range, or through a Ring from the "
                        "pages of worker processes. Any thread; see vmm_csrc/pool/pool.h.");
  bind_pool_tiers(m, pool);
  pool.def(nb::new_(&make_pool), "memory"_a, nb::kw_only(), "max_blocks"_a, "limit_bytes"_a,
           "capacity_bytes"_a, "min_reserved_pages"_a = 5, "max_reserved_pages"_a = 10,
           "max_cached_blocks"_a = -1, "cache_idle_s"_a = -1.0, "preallocate"_a = true,
           "device_set"_a = nb::none(), "reclaim_wait_s"_a = 0.05, "movable"_a = false)
      .def("alloc", &alloc, "count"_a, nb::kw_only(), "reuse"_a = false,
           "Return the ids of `count` blocks, or None if too few are available; then nothing has "
           "changed. With `reuse`, before it maps a page, it also takes freed blocks that are "
           "still pinned, except strictly pinned ones. May block to map pages.")
      .def("alloc_run", &alloc_run, "pages"_a,
           "Return the ids of every block in `pages` consecutive pages, or None if they are not "
           "available; then nothing has changed. Blocks.")
      .def("free", &with_ids<&Allocator::free>, "ids"_a,
           "Free used or cached blocks. Blocks only if the pool is over its limit. All or nothing; "
           "raises DoubleFreeError, UnknownBlockError or NullBlockError.")
      .def("touch", &with_ids<&Allocator::touch>, "ids"_a,
           "Turn cached blocks into used ones. All or nothing; raises as free().")
      .def(
          "pin",
          [](Pool& pool, Integers ids, std::string_view kind) {
            return unwrap(in_owner(pool).allocator.pin(integers_of(ids), pin_kind(kind)));
          },
          "ids"_a, nb::kw_only(), "kind"_a = "strict",
          "Pin used or cached blocks and return a ticket. Until unpin() they are not evicted, "
          "moved, unmapped or allocated, even if they are freed in the meantime. `kind` is what "
          "alloc(reuse=True) may do with freed ones before that. strict: nothing. fenced: use them "
          "last, because the engine makes their next user wait for the reader. ordered: use them, "
          "because their next user's work follows the reader's in one queue. All or nothing; "
          "raises UnknownBlockError (also for free blocks) or NullBlockError.")
      .def("unpin", &unpin, "ticket"_a,
           "End a pin. Blocks that were freed or cached in the meantime are free or cached now. "
           "Returns False if the pin had already ended.")
      .def(
          "pinned",
          [](const Pool& pool, bool strict) {
            return list_of(pinned(in_owner(pool).state, strict));
          },
          nb::kw_only(), "strict"_a = true,
          "Return the ids of freed blocks that are still pinned. Without `strict`, leave out those "
          "that have a strict pin, which may last.")
      .def_prop_ro("reusable", &from_state<&PoolState::reusable>,
                   "The number of freed, still pinned blocks that alloc(reuse=True) could use.")
      .def("available_size", &from_state<&PoolState::available>,
           "Return how many blocks alloc() could return now.")
      .def("available_mapped", &from_state<&PoolState::available_mapped>,
           "Return how many blocks alloc() could return now without mapping a page.")
      .def(
          "ensure",
          [](Pool& pool, std::uint64_t count, std::uint64_t needed) {
            std::uint64_t mapped = 0;
            if (in_owner(pool).allocator.try_ensure(count, needed, mapped)) return mapped;
            return unwrap(without_gil([&] { return pool.allocator.ensure(count, needed); }));
          },
          "count"_a, nb::kw_only(), "needed"_a = 0,
          "Map pages within the limit until `count` blocks are free. Never evicts. In a session it "
          "waits for other instances only while fewer than `needed` blocks are available. Returns "
          "available_mapped().")
      .def_prop_ro("given_back_epoch", &from_state<&PoolState::given_back_epoch>,
                   "The part of the increments of `availability_epoch` that free() and cache() "
                   "caused.")
      .def_prop_ro("availability_epoch", &from_state<&PoolState::epoch>,
                   "A number that is incremented whenever more blocks become available. Read it "
                   "before a call that may fail for lack of blocks.")
      .def(
          "wait_for_epoch",
          [](Pool& pool, std::uint32_t seen, double timeout_s) {
            const std::chrono::nanoseconds timeout = duration(timeout_s);
            return without_gil([&pool = in_owner(pool), seen, timeout] {
              return pool.allocator.wait_for_epoch(seen, timeout);
            });
          },
          "seen"_a, "timeout_s"_a,
          "Block until `availability_epoch` differs from `seen`, at most `timeout_s` seconds, and "
          "return it. While a thread waits here, the maintenance thread keeps requesting the "
          "missing memory.")
      .def("report_busy", &report_busy, "busy"_a,
           "Report to the ledgers whether the engine has unfinished requests. Without any, others "
           "may take its cache at once. Before the first report, idleness is derived from the time "
           "since the last alloc or free.")
      .def(
          "report_waiting",
          [](Pool& pool, std::uint64_t requests, std::uint64_t first_blocks,
             std::uint64_t first_may_blocks) {
            const Waiting waiting{requests, first_blocks, first_may_blocks};
            const WaitingBytes bytes = without_gil([&pool = in_owner(pool), &waiting] {
              return pool.allocator.report_waiting(waiting);
            });
            return std::tuple(bytes.first_needs, bytes.first_may_need, bytes.allowed);
          },
          "requests"_a, nb::kw_only(), "first_blocks"_a = 0, "first_may_blocks"_a = 0,
          "Report how many requests wait for memory, how many blocks the first of them needs in "
          "all (0: unknown), and how many it needs if its output has the maximum length. The "
          "values are published with the usage. Returns in bytes the least limit for each of the "
          "two needs, and what limit and device allow (0 while asleep).")
      .def(
          "try_to_reserve",
          [](Pool& pool, std::uint64_t count) {
            in_owner(pool);
            return unwrap(without_gil([&] { return pool.allocator.try_to_reserve(count); }));
          },
          "count"_a,
          "Reserve blocks for the next allocs. Returns False if too few are available. A lower "
          "limit, sleep and memory requests of other instances drop the reservation. Blocks.")
      .def("free_reserved",
           [](Pool& p) { without_gil([&p = in_owner(p)] { p.allocator.free_reserved(); }); })
      .def_prop_ro("has_evicted", &from_state<&PoolState::has_changes>)
      .def(
          "take_changes",
          [](Pool& pool) {
            nb::typed<nb::list, std::pair<BlockId, BlockId>> out;
            for (const BlockChange& change : in_owner(pool).allocator.take_changes()) {
              out.append(nb::make_tuple(change.id, change.to));
            }
            return out;
          },
          "Return (id, to) of every cached block that was moved or evicted since the last call, in "
          "order. `to` is the new id after a move. It is negative after an eviction, and the "
          "engine must forget the contents: -2 if a tier has a copy, -1 if none has.")
      .def(
          "compact",
          [](Pool& pool) {
            return unwrap(
                without_gil([&pool = in_owner(pool)] { return pool.background.compact(); }));
          },
          "Move the cached blocks of one page into holes of other pages. Returns how many blocks "
          "moved. Blocks.")
      .def(
          "session",
          [](std::shared_ptr<Pool> pool, std::optional<Callback> begun) {
            return PySession(std::move(pool), std::move(begun));
          },
          "begun"_a = nb::none(),
          "Return a context manager: in its block, only calls of this thread take blocks away. It "
          "waits while another thread is in a session, and then calls `begun`; if that raises, no "
          "session begins. May be nested. A signal handler that raises ends the session as any "
          "exception does.")
      .def_prop_ro(
          "session_depth",
          [](const Pool& pool) {
            const Session& session = pool.state.session;
            return session.is_mine() ? session.depth() : 0;
          },
          "How many sessions this thread is in.")
      .def("set_limit", &set_limit, "limit_bytes"_a,
           "Set the limit and release the memory beyond it, except for blocks in use. Blocks.")
      .def(
          "sleep",
          [](Pool& pool) {
            in_owner(pool);
            return limit_dict(unwrap(without_gil([&]() -> Result<LimitState> {
              pool.limits.set_asleep(true);
              return pool.limits.settle();
            })));
          },
          "Evict cached blocks at once and release all memory, including the null block's page, as "
          "soon as no block is in use. Waits for pages that other threads are unmapping. No block "
          "is allocated until wake().")
      .def(
          "wake",
          [](Pool& pool, std::optional<double> timeout_s) {
            const auto timeout = timeout_s ? duration(*timeout_s) : reserve_wait();
            check(without_gil(
                [&pool = in_owner(pool), timeout] { return pool.limits.wake(timeout); }));
          },
          "timeout_s"_a = nb::none(),
          "Allow allocs again. The next alloc or ensure maps the null block's page. First claims "
          "guarantee and reserve from the ledger and blocks until others have released that "
          "memory: at most `timeout_s` seconds, five by default. Raises GuaranteeError or "
          "ReserveError; the pool then stays asleep.")
      .def_prop_ro("is_asleep", [](const Pool& pool) { return in_owner(pool).state.is_asleep(); })
      .def_prop_ro("is_over_limit", &from_state<&PoolState::is_over_limit>,
                   "True if the pool holds more memory than the limit allows.")
      .def(
          "excess",
          [](const Pool& pool) {
            const Limits::Excess excess = in_owner(pool).limits.excess();
            nb::dict used;
            for (const auto& [page, blocks] : excess.used) used[nb::int_(page)] = blocks;
            return std::pair<std::uint64_t, nb::typed<nb::dict, PageIndex, std::uint32_t>>(
                excess.pages, used);
          },
          "Return (pages, used): how many pages must be emptied until the limit holds, and for "
          "each candidate page how many of its blocks are in use, including pinned ones.")
      .def("limit_state",
           [](const Pool& pool) { return limit_dict(in_owner(pool).state.limit_state()); })
      .def(
          "trim",
          [](Pool& pool) {
            return unwrap(
                       without_gil([&pool = in_owner(pool)] { return pool.background.trim(); })) *
                   pool.state.page_bytes();
          },
          "Unmap every parked page. Returns the released bytes. Blocks.")
      .def(
          "clear",
          [](Pool& pool) { without_gil([&pool = in_owner(pool)] { pool.allocator.clear(); }); },
          "Free every block and drop every reservation.")
      .def(
          "close",
          [](Pool& pool, bool discard) {
            in_owner(pool);
            return unwrap(without_gil([&] { return pool.close(discard); })) *
                   pool.state.page_bytes();
          },
          nb::kw_only(), "discard"_a = false,
          "Close the pool: allocate no further block and release the memory that is not in use, or "
          "with `discard` all memory. Returns the bytes that are still held. Blocks.")
      .def_prop_ro("mapped_bytes",
                   [](const Pool& pool) { return in_owner(pool).state.limit_state().mapped_bytes; })
      .def_prop_ro("geometry", [](const Pool& pool) { return pool.state.geometry; })
      .def("occupancy", &occupancy, "pages"_a = nb::none(),
           "Return the number of used or cached blocks by page, for mapped pages only.")
      .def("stats", &stats_dict)
      .def_prop_ro(
          "max_cached_blocks",
          [](const Pool& pool) { return in_owner(pool).state.options.max_cached_blocks; },
          "The maximum number of cached blocks; -1: unlimited.")
      .def_prop_ro(
          "oldest_copyable_s",
          [](Pool& pool) {
            return std::chrono::duration<double>(in_owner(pool).writeback.oldest_copyable())
                .count();
          },
          "The age in seconds of the oldest cached block that a tier can copy; 0 without one.")
      .def("check_integrity", [](const Pool& pool) { check(in_owner(pool).check_integrity()); });

  nb::class_<MaintenanceThread>(m, "MaintenanceThread",
                                "The instance's maintenance thread: executes requests, maps pages "
                                "ahead of demand, and unmaps unused parked pages.")
      .def_static(
          "start",
          [](std::shared_ptr<Pool> pool, const PyControlBlock& control_block, double idle_trim_s,
             bool sanity_check, bool watch_memory) {
            in_owner(*pool);
            MaintenanceOptions options;
            const std::chrono::nanoseconds idle = duration(idle_trim_s);
            options.idle_trim = idle == kForever ? std::chrono::nanoseconds(-1) : idle;
            options.sanity_check = sanity_check;
            options.watch_memory = watch_memory;
            return std::shared_ptr<MaintenanceThread>(
                MaintenanceThread::start(std::move(pool), control_block.native(), options));
          },
          "pool"_a, "control_block"_a, "idle_trim_s"_a = 5.0, "sanity_check"_a = false,
          "watch_memory"_a = false)
      .def_prop_ro("memory_looks", &MaintenanceThread::memory_looks,
                   "How many times the machine's free memory was checked.")
      .def(
          "stop", [](MaintenanceThread& thread) { without_gil([&] { thread.stop(); }); },
          "Stop the thread. Blocks until its current work is done. Idempotent.");
}

}  // namespace kvelastic
