// `kvelastic._vmm`: the pool, its keeper, and the ring to a worker process.
#include "pool/pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "bind/errors.h"
#include "bind/ids.h"
#include "bind/pool_tiers.h"
#include "bind/record.h"
#include "pool/maintenance_thread.h"
#include "segment/ring_backing.h"
#include "segment/ring_worker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

constexpr double kNanosecondsPerSecond = 1e9;

/// Seconds from Python; negative or beyond any clock: for ever.
std::chrono::nanoseconds duration(double seconds) {
  if (std::isnan(seconds)) raise_code("INVALID_ARGUMENT", "a time in seconds cannot be nan");
  if (seconds < 0 || seconds > 1e9) return kForever;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * kNanosecondsPerSecond));
}

/// How long what is to be reserved is waited for.
std::chrono::nanoseconds reserve_wait() {
  return std::chrono::nanoseconds(ReclaimRules{}.reserve_wait_ns);
}

/// The ring area of a segment, and what keeps it mapped.
std::pair<std::span<std::byte>, std::shared_ptr<BufferHold>> ring_area(const PyRecord& record) {
  std::shared_ptr<BufferHold> hold = record.hold();
  if (hold->readonly()) raise_code("SEGMENT", "a ring needs a segment opened for writing");
  const RecordHeader& header = record.view().header();
  return {hold->bytes().subspan(header.ring_offset, header.ring_bytes), hold};
}

std::shared_ptr<Pool> make_pool(nb::handle memory, std::uint64_t max_blocks,
                                std::uint64_t limit_bytes, std::uint64_t capacity_bytes,
                                std::uint64_t min_reserved_pages, std::uint64_t max_reserved_pages,
                                std::int64_t max_cached_blocks, double cache_idle_s,
                                bool preallocate, std::shared_ptr<Places> places,
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
                               std::move(places)));
  }
  std::shared_ptr<RingBacking> ring;
  if (!nb::try_cast(memory, ring) || ring == nullptr) {
    throw nb::type_error("memory must be a Range or a Ring");
  }
  return unwrap(Pool::create(ring->geometry(), ring, options, std::move(places)));
}

nb::object alloc(Pool& pool, std::uint64_t count, bool reuse) {
  std::optional<std::vector<BlockId>> ids;
  // The common case takes no page. To give the GIL away in it would cost far more than it takes: a
  // thread that wants it has it for up to 5 ms then, and the engine's step stands still.
  if (!own(pool).allocator.try_alloc(count, ids, reuse)) {
    ids = unwrap(without_gil([&] { return pool.allocator.alloc(count, reuse); }));
  }
  return ids ? list_of(*ids) : nb::none();
}

nb::object alloc_run(Pool& pool, std::uint64_t pages) {
  own(pool);
  const std::optional<std::vector<BlockId>> ids =
      unwrap(without_gil([&] { return pool.allocator.alloc_run(pages); }));
  return ids ? list_of(*ids) : nb::none();
}

/// One of the lock-free values.
template <auto method>
auto from_state(const Pool& pool) {
  return (pool.state.*method)();
}

void report_busy(Pool& pool, bool busy) {
  if (own(pool).state.places) pool.state.places->report_busy(busy);
}

/// free and touch only block where they have to give memory back.
template <Status (Allocator::*method)(std::span<const BlockId>)>
void with_ids(Pool& pool, nb::handle sequence) {
  const std::vector<std::int64_t> ids = integers_of(sequence);
  if (own(pool).state.is_over_limit()) {
    check(without_gil([&] { return (pool.allocator.*method)(ids); }));
  } else {
    check((pool.allocator.*method)(ids));
  }
}

std::vector<BlockId> pinned(const PoolState& pool) {
  const PoolState::Look state(pool);
  return state->accounting.blocks().waiting_ids();
}

PinKind pin_kind(std::string_view name) {
  if (name == "strict") return PinKind::kStrict;
  if (name == "fenced") return PinKind::kFenced;
  if (name == "ordered") return PinKind::kOrdered;
  raise_code("INVALID_ARGUMENT", "a pin is strict, fenced or ordered, not " + std::string(name));
}

/// As free, it only blocks where it has to give memory back.
bool unpin(Pool& pool, PinTicket ticket) {
  if (!own(pool).state.is_over_limit()) return pool.allocator.unpin(ticket);
  return without_gil([&] { return pool.allocator.unpin(ticket); });
}

nb::dict limit_dict(const LimitState& state) {
  nb::dict out;
  out["state"] = state.over_bytes == 0 ? "applied" : "shrinking";
  out["limit_bytes"] = state.limit_bytes;
  out["effective_limit_bytes"] = state.effective_bytes;
  out["mapped_bytes"] = state.mapped_bytes;
  out["over_bytes"] = state.over_bytes;
  return out;
}

nb::dict set_limit(Pool& pool, std::uint64_t limit_bytes) {
  own(pool);
  return limit_dict(unwrap(without_gil([&] {
    (void)pool.limits.set(limit_bytes);
    return pool.limits.enforce();
  })));
}

nb::dict stats_dict(const Pool& pool) {
  const PoolStats stats = own(pool).state.stats();
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
  out["blocks_leaving"] = stats.blocks_under_writeback;
  out["blocks_demoted"] = stats.blocks_demoted;
  out["blocks_dropped"] = stats.blocks_dropped;
  out["pages_mapped_ever"] = stats.pages_mapped_ever;
  out["pages_unmapped_ever"] = stats.pages_unmapped_ever;
  out["provision_runs"] = stats.provision_runs;
  return out;
}

nb::dict occupancy(const Pool& pool, nb::object pages) {
  const PoolState& state = own(pool).state;
  const auto occupancy_of = [&](PageIndex page) {
    return PoolState::Look(state)->accounting.blocks().occupancy(page);
  };
  nb::dict out;
  if (!pages.is_none()) {
    for (const std::uint32_t page : pages_of(pages)) {
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
  nb::class_<RingBacking>(m, "Ring", "The scheduler's end of the ring to its worker processes.")
      .def_static(
          "create",
          [](const PyRecord& record, const Geometry& geometry, double timeout_s,
             std::size_t ranks) {
            auto [area, hold] = ring_area(record);
            return std::shared_ptr<RingBacking>(
                unwrap(RingBacking::create(area, geometry, ranks, duration(timeout_s), hold)));
          },
          "record"_a, "geometry"_a, "timeout_s"_a, "ranks"_a = 1,
          "Write an empty ring for `ranks` workers into a segment; commands wait timeout_s at most "
          "(< 0: for ever).")
      .def(
          "wait_for_workers",
          [](RingBacking& ring, double timeout_s) {
            check(without_gil([&] { return ring.wait_for_workers(duration(timeout_s)); }));
          },
          "timeout_s"_a, "Block until every rank has a worker. Raises ChannelTimeoutError.")
      .def(
          "ping", [](RingBacking& ring) { check(without_gil([&] { return ring.ping(); })); },
          "Ask every worker for nothing but an answer. Raises ChannelError.")
      .def_prop_ro(
          "has_live_processes", [](const RingBacking& ring) { return ring.has_live_processes(); },
          "Whether a worker's process, other than this one, lives.")
      .def_prop_ro(
          "workers", [](const RingBacking& ring) { return ring.workers(); },
          "(pid, start time in ticks) of the process of each rank; (0, 0): none yet.")
      .def_prop_ro("geometry", &RingBacking::geometry);

  nb::class_<RingWorker>(m, "RingWorker",
                         "The worker's end: a native thread that maps and unmaps as told.")
      .def_static(
          "start",
          [](const PyRecord& record, std::shared_ptr<Range> range, std::size_t rank) {
            auto [area, hold] = ring_area(record);
            return std::shared_ptr<RingWorker>(
                unwrap(RingWorker::start(area, std::move(range), rank, hold)));
          },
          "record"_a, "range"_a, "rank"_a = 0,
          "Serve the segment's ring on a range as one of its ranks, until stop().")
      .def("stop", [](RingWorker& worker) { without_gil([&] { worker.stop(); }); });
}

}  // namespace

void bind_pool(nb::module_& m) {
  bind_ring(m);

  nb::class_<Pool> pool(m, "Pool",
                        "Blocks over a Range, or over a Ring to the process that has it. Any "
                        "thread; see vmm_csrc/pool/pool.h.");
  bind_pool_tiers(m, pool);
  pool.def(nb::new_(&make_pool), "memory"_a, nb::kw_only(), "max_blocks"_a, "limit_bytes"_a,
           "capacity_bytes"_a, "min_reserved_pages"_a = 5, "max_reserved_pages"_a = 10,
           "max_cached_blocks"_a = -1, "cache_idle_s"_a = -1.0, "preallocate"_a = true,
           "places"_a = nb::none(), "reclaim_wait_s"_a = 0.05, "movable"_a = false)
      .def("alloc", &alloc, "count"_a, nb::kw_only(), "reuse"_a = false,
           "Ids of `count` blocks, or None when that many cannot be had; nothing has changed then. "
           "With `reuse`, before a page is mapped, also blocks that were given back and are still "
           "pinned, but not strictly.")
      .def("alloc_run", &alloc_run, "pages"_a,
           "Ids of all blocks of `pages` pages side by side, one run of addresses, or None when "
           "they "
           "cannot be had; nothing has changed then. Blocks.")
      .def("free", &with_ids<&Allocator::free>, "ids"_a,
           "Give blocks back, used or cached. All or nothing; raises DoubleFreeError, "
           "UnknownBlockError, NullBlockError.")
      .def("touch", &with_ids<&Allocator::touch>, "ids"_a, "Use cached blocks again.")
      .def(
          "pin",
          [](Pool& pool, nb::handle ids, std::string_view kind) {
            return unwrap(own(pool).allocator.pin(integers_of(ids), pin_kind(kind)));
          },
          "ids"_a, nb::kw_only(), "kind"_a = "strict",
          "Keep used or cached blocks where they are, and from being handed out, until unpin(), "
          "whoever gives them back meanwhile; returns a ticket. kind: what alloc(reuse=True) may "
          "do before: strict: nothing; fenced: use them last, since the engine makes their next "
          "user wait for the reader; ordered: use them, since their next user's work comes after "
          "the reader's in one queue. All or nothing; raises UnknownBlockError (free blocks, too), "
          "NullBlockError.")
      .def("unpin", &unpin, "ticket"_a,
           "End a pin: what was given back meanwhile is free or cached now. False: it had ended.")
      .def(
          "pinned", [](const Pool& pool) { return list_of(pinned(own(pool).state)); },
          "Ids of blocks that were given back and are still pinned.")
      .def_prop_ro("reusable", &from_state<&PoolState::reusable>,
                   "How many of these alloc(reuse=True) could use again.")
      .def("available_size", &from_state<&PoolState::available>,
           "Blocks that alloc could give now.")
      .def("available_mapped", &from_state<&PoolState::available_mapped>,
           "Blocks that alloc could give now without mapping a page.")
      .def(
          "ensure",
          [](Pool& pool, std::uint64_t count, std::uint64_t needed) {
            std::uint64_t mapped = 0;
            if (own(pool).allocator.try_ensure(count, needed, mapped)) return mapped;
            return unwrap(without_gil([&] { return pool.allocator.ensure(count, needed); }));
          },
          "count"_a, nb::kw_only(), "needed"_a = 0,
          "Map pages until `count` blocks are free, as far as the limit goes; never evicts. In a "
          "session it waits for other instances only while fewer than `needed` could be had. "
          "Returns available_mapped().")
      .def_prop_ro("given_back_arrivals", &from_state<&PoolState::given_back_epoch>,
                   "How many of the arrivals came of free and cache.")
      .def_prop_ro("arrivals", &from_state<&PoolState::epoch>,
                   "Goes up whenever blocks can be had that could not be had before. Read it "
                   "before a try that may fail.")
      .def(
          "wait_for_arrival",
          [](Pool& pool, std::uint32_t seen, double timeout_s) {
            const std::chrono::nanoseconds timeout = duration(timeout_s);
            return without_gil([&pool = own(pool), seen, timeout] {
              return pool.allocator.wait_for_epoch(seen, timeout);
            });
          },
          "seen"_a, "timeout_s"_a,
          "Block until arrivals is another than `seen`, timeout_s at most; returns it. The keeper "
          "goes on asking for what is missing as long as this is called.")
      .def("report_busy", &report_busy, "busy"_a,
           "Report to the ledgers whether the engine has unfinished requests: without any, others "
           "may take its cache at once. Until the first call that is judged by the time since the "
           "last alloc or free.")
      .def(
          "report_waiting",
          [](Pool& pool, std::uint64_t requests, std::uint64_t first_blocks,
             std::uint64_t first_may_blocks) {
            const Waiting waiting{requests, first_blocks, first_may_blocks};
            const WaitingBytes bytes = without_gil(
                [&pool = own(pool), &waiting] { return pool.allocator.report_waiting(waiting); });
            return nb::make_tuple(bytes.first_needs, bytes.first_may_need, bytes.allowed);
          },
          "requests"_a, nb::kw_only(), "first_blocks"_a = 0, "first_may_blocks"_a = 0,
          "Report how many requests wait for memory, how many blocks the first of them needs in "
          "all (0: not known), and how many at its end if its answer is the longest. Published "
          "with "
          "the usage. Returns the least limit in bytes for either, and what limit and device allow "
          "(0 in sleep).")
      .def(
          "try_to_reserve",
          [](Pool& pool, std::uint64_t count) {
            own(pool);
            return unwrap(without_gil([&] { return pool.allocator.try_to_reserve(count); }));
          },
          "count"_a,
          "Set blocks aside for the next allocs; False when there are not as many. They make way "
          "for a lower limit, sleep and other instances.")
      .def("free_reserved",
           [](Pool& p) { without_gil([&p = own(p)] { p.allocator.free_reserved(); }); })
      .def_prop_ro("has_evicted", &from_state<&PoolState::has_changes>)
      .def(
          "take_changes",
          [](Pool& pool) {
            nb::list out;
            for (const BlockChange& change : own(pool).allocator.take_changes()) {
              out.append(nb::make_tuple(change.id, change.to));
            }
            return out;
          },
          "(id, to) of every cached block that moved (to: where it is) or was evicted (to < 0: "
          "forget\n"
          "what it held; -2: a tier has a copy, -1: none has) since the last call, in order.")
      .def(
          "compact",
          [](Pool& pool) {
            return unwrap(without_gil([&pool = own(pool)] { return pool.maintenance.compact(); }));
          },
          "Move the cached blocks of one page into holes of others; returns how many moved.")
      .def(
          "enter",
          [](Pool& pool) {
            if (!own(pool).state.session.try_lock())
              without_gil([&] { pool.state.session.lock(); });
          },
          "Begin a session: until exit() nothing but this thread's own calls takes blocks away.")
      .def(
          "exit",
          [](Pool& pool) {
            if (!own(pool).state.session.is_mine()) {
              raise_code("INVALID_ARGUMENT", "exit() without enter() in this thread");
            }
            pool.state.session.unlock();
          },
          "End the session. Raises InvalidArgumentError where this thread has begun none.")
      .def("set_limit", &set_limit, "limit_bytes"_a,
           "Set the limit and give back what is over it, as far as that can be had.")
      .def(
          "sleep",
          [](Pool& pool) {
            own(pool);
            return limit_dict(unwrap(without_gil([&]() -> Result<LimitState> {
              pool.limits.set_asleep(true);
              return pool.limits.settle();
            })));
          },
          "Hold nothing, not even the null block's page, as soon as no block is in use; cached "
          "blocks are evicted at once. Waits for pages that others have begun to unmap. No block "
          "is handed out until wake().")
      .def(
          "wake",
          [](Pool& pool, std::optional<double> timeout_s) {
            const auto timeout = timeout_s ? duration(*timeout_s) : reserve_wait();
            check(without_gil([&pool = own(pool), timeout] { return pool.limits.wake(timeout); }));
          },
          "timeout_s"_a = nb::none(),
          "Hand out blocks again; the next alloc or ensure maps the null block's page. Its "
          "guarantee\n"
          "and its reserve are asked of the ledger first; waits for what others have to give, "
          "five\n"
          "seconds unless `timeout_s` says otherwise. Raises GuaranteeError, ReserveError; it "
          "sleeps\n"
          "on then.")
      .def_prop_ro("is_asleep", [](const Pool& pool) { return own(pool).state.is_asleep(); })
      .def_prop_ro("is_over_limit", &from_state<&PoolState::is_over_limit>,
                   "Whether more is held than the limit allows.")
      .def(
          "excess",
          [](const Pool& pool) {
            const Limits::Excess excess = own(pool).limits.excess();
            nb::dict used;
            for (const auto& [page, blocks] : excess.used) used[nb::int_(page)] = blocks;
            return nb::make_tuple(excess.pages, used);
          },
          "How many pages have to be emptied for the limit to hold, and of each page that could "
          "be how many of its blocks are in use, those that are pinned included.")
      .def("limit_state",
           [](const Pool& pool) { return limit_dict(own(pool).state.limit_state()); })
      .def(
          "trim",
          [](Pool& pool) {
            return unwrap(without_gil([&pool = own(pool)] { return pool.maintenance.trim(); })) *
                   pool.state.page_bytes();
          },
          "Give every parked page back; returns the bytes.")
      .def(
          "clear", [](Pool& pool) { without_gil([&pool = own(pool)] { pool.allocator.clear(); }); },
          "Free every block and every reservation.")
      .def(
          "close",
          [](Pool& pool, bool discard) {
            own(pool);
            return unwrap(without_gil([&] { return pool.close(discard); })) *
                   pool.state.page_bytes();
          },
          nb::kw_only(), "discard"_a = false,
          "Hand out nothing any more and give all back that is not in use, or all; returns the "
          "bytes that are still held.")
      .def_prop_ro("mapped_bytes",
                   [](const Pool& pool) { return own(pool).state.limit_state().mapped_bytes; })
      .def_prop_ro("geometry", [](const Pool& pool) { return pool.state.geometry; })
      .def("occupancy", &occupancy, "pages"_a = nb::none(),
           "Blocks in use or cached, by page; only mapped pages.")
      .def("stats", &stats_dict)
      .def_prop_ro(
          "max_cached_blocks",
          [](const Pool& pool) { return own(pool).state.options.max_cached_blocks; },
          "How many blocks the pool keeps cached; -1: no bound.")
      .def_prop_ro(
          "oldest_copyable_s",
          [](Pool& pool) {
            return std::chrono::duration<double>(own(pool).writeback.oldest_copyable()).count();
          },
          "For how long the oldest block that a tier can copy has been cached; 0 without one.")
      .def("check_integrity", [](const Pool& pool) { check(own(pool).check_integrity()); });

  nb::class_<MaintenanceThread>(m, "Keeper",
                                "The instance's thread: requests, provisioning, decay.")
      .def_static(
          "start",
          [](std::shared_ptr<Pool> pool, const PyRecord& record, double idle_trim_s,
             bool sanity_check, bool watch_memory) {
            own(*pool);
            MaintenanceOptions options;
            const std::chrono::nanoseconds idle = duration(idle_trim_s);
            options.idle_trim = idle == kForever ? std::chrono::nanoseconds(-1) : idle;
            options.sanity_check = sanity_check;
            options.watch_memory = watch_memory;
            return std::shared_ptr<MaintenanceThread>(
                MaintenanceThread::start(std::move(pool), record.native(), options));
          },
          "pool"_a, "record"_a, "idle_trim_s"_a = 5.0, "sanity_check"_a = false,
          "watch_memory"_a = false)
      .def_prop_ro("memory_looks", &MaintenanceThread::memory_looks,
                   "How often it has looked what the machine has left.")
      .def(
          "stop", [](MaintenanceThread& keeper) { without_gil([&] { keeper.stop(); }); },
          "End the thread. Blocks until what it does is done.");
}

}  // namespace kvelastic
