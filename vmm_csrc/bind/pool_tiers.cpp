// `kvelastic._vmm`: the methods of a pool that tiers use.
#include "bind/pool_tiers.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bind/errors.h"
#include "bind/ids.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

/// Bounded to an hour, so that every wait ends.
std::chrono::nanoseconds wait_of(double seconds) {
  if (std::isnan(seconds)) raise_code("INVALID_ARGUMENT", "a time in seconds cannot be nan");
  constexpr double kMostSeconds = 3600, kNanoseconds = 1e9;
  return std::chrono::nanoseconds(
      static_cast<std::int64_t>(std::clamp(seconds, 0.0, kMostSeconds) * kNanoseconds));
}

void copy(Pool& pool, nb::handle ids, const std::shared_ptr<Staging>& staging, nb::handle slots,
          CopyTo to) {
  const std::vector<BlockSlot> blocks = block_slots_of(ids, slots);
  check(without_gil([&pool = in_owner(pool), &blocks, &staging, to] {
    return pool.writeback.copy_records(blocks, staging, to);
  }));
}

/// Splits the concatenated keys of `count` blocks.
std::vector<BlockKey> keys_of(const nb::bytes& keys, std::size_t count) {
  if (keys.size() != count * sizeof(BlockKey)) {
    raise_code("INVALID_ARGUMENT", std::to_string(keys.size()) + " bytes of keys for " +
                                       std::to_string(count) + " blocks; give 16 for each");
  }
  std::vector<BlockKey> out(count);
  std::memcpy(out.data(), keys.data(), keys.size());
  return out;
}

/// Like free(), it blocks only if the pool is over its limit and must unmap pages.
void cache(Pool& pool, Integers sequence, const std::optional<nb::bytes>& keys) {
  const std::vector<std::int64_t> ids = integers_of(sequence);
  const std::vector<BlockKey> named = keys ? keys_of(*keys, ids.size()) : std::vector<BlockKey>();
  const auto run = [&] {
    return keys ? pool.allocator.cache(ids, named) : pool.allocator.cache(ids);
  };
  check(in_owner(pool).state.is_over_limit() ? without_gil(run) : run());
}

const char* name_of(DemotionReason reason) {
  switch (reason) {
    case DemotionReason::kReclaim:
      return "reclaim";
    case DemotionReason::kLimit:
      return "limit";
    case DemotionReason::kSleep:
      return "sleep";
  }
  return "?";
}

double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

void bind_results(nb::module_& m) {
  nb::class_<Writeback::Demotion>(m, "Demotion",
                                  "A request to copy blocks before the pool evicts them.")
      .def_prop_ro(
          "reason", [](const Writeback::Demotion& want) { return name_of(want.reason); },
          "Why the pool shrinks: reclaim, limit or sleep.")
      .def_ro("blocks", &Writeback::Demotion::blocks, "The number of cached blocks without a copy.")
      .def_prop_ro("seconds_left",
                   [](const Writeback::Demotion& want) { return seconds(want.left); });
  nb::class_<WritebackBatch>(m, "WritebackBatch", "Blocks under writeback.")
      .def_ro("ticket", &WritebackBatch::ticket)
      .def_prop_ro("ids", [](const WritebackBatch& batch) { return list_of(batch.ids); })
      .def_prop_ro("keys", [](const WritebackBatch& batch) {
        return nb::bytes(batch.keys.data(), batch.keys.size() * sizeof(BlockKey));
      });
}

std::uint64_t end_writeback(Pool& pool, std::uint32_t ticket,
                            nb::typed<nb::handle, std::vector<bool>> copied) {
  std::vector<std::uint8_t> flags;
  for (const std::int64_t flag : integers_of(copied)) flags.push_back(flag != 0 ? 1 : 0);
  return unwrap(in_owner(pool).writeback.end(ticket, flags));
}

}  // namespace

void bind_pool_tiers(nb::module_& m, nb::class_<Pool>& pool) {
  bind_results(m);
  pool.def("cache", &cache, "ids"_a, "keys"_a = nb::none(),
           "Turn used blocks into cached ones: they keep their contents until the memory is "
           "needed. Earlier ids are evicted earlier. `keys` has 16 bytes per block, zeros for "
           "none: the keys under which a tier may store them. All or nothing. Raises as free().")
      .def(
          "name_blocks",
          [](Pool& self, Integers sequence, const nb::bytes& keys) {
            const std::vector<std::int64_t> ids = integers_of(sequence);
            check(in_owner(self).writeback.name(ids, keys_of(keys, ids.size())));
          },
          "ids"_a, "keys"_a,
          "Set the keys of used or cached blocks. A block whose key changes counts as not copied. "
          "All or nothing. Raises UnknownBlockError (also for free blocks) and NullBlockError.")
      .def(
          "use_tiers",
          [](Pool& self, double reclaim_wait_s, double limit_wait_s, double sleep_wait_s) {
            in_owner(self).writeback.use_tiers(
                {wait_of(reclaim_wait_s), wait_of(limit_wait_s), wait_of(sleep_wait_s)});
          },
          nb::kw_only(), "reclaim_wait_s"_a = 0.02, "limit_wait_s"_a = 2.0, "sleep_wait_s"_a = 30.0,
          "Count evictions as demoted or dropped from now on. A shrinking pool waits for copies, "
          "at most for the given times in seconds, while a thread serves next_demotion().")
      .def(
          "mark_clean",
          [](Pool& self, Integers sequence, const nb::bytes& keys) {
            const std::vector<std::int64_t> ids = integers_of(sequence);
            return in_owner(self).writeback.mark_clean(ids, keys_of(keys, ids.size()));
          },
          "ids"_a, "keys"_a,
          "Report that a tier has copies of these blocks. Marks a block as clean if it still has "
          "the given key. Returns how many it marked.")
      .def(
          "forget_copies", [](Pool& self) { return in_owner(self).writeback.forget_copies(); },
          "Report that no tier has a copy of any block. Returns how many blocks were clean.")
      .def(
          "next_demotion",
          [](Pool& self, double timeout_s) {
            const std::chrono::nanoseconds timeout = wait_of(timeout_s);
            return without_gil([&self = in_owner(self), timeout] {
              return self.writeback.next_demotion(timeout);
            });
          },
          "timeout_s"_a,
          "Block until the shrinking pool has blocks to copy, at most `timeout_s` seconds or until "
          "stop_demotions(). Returns None in the latter cases. From the first call on, a shrinking "
          "pool waits for copies.")
      .def(
          "clean",
          [](Pool& self, double timeout_s) {
            const std::chrono::nanoseconds timeout = wait_of(timeout_s);
            return without_gil(
                [&self = in_owner(self), timeout] { return self.writeback.clean(timeout); });
          },
          "timeout_s"_a,
          "Have every cached block with a key copied; the blocks stay cached. Blocks at most "
          "`timeout_s` seconds. Returns how many cached blocks are left without a copy.")
      .def(
          "stop_demotions", [](Pool& self) { in_owner(self).writeback.stop_demotions(); },
          "Stop serving next_demotion(). From now on no call waits for copies.")
      .def(
          "begin_writeback",
          [](Pool& self, std::uint64_t most) { return in_owner(self).writeback.begin(most); },
          "most"_a,
          "Start writeback of at most `most` dirty cached blocks that have keys: the oldest, or "
          "the next to be evicted while the pool shrinks. Their contents can be copied, and their "
          "pages stay, until end_writeback().")
      .def(
          "still_unchanged",
          [](const Pool& self, std::uint32_t ticket) {
            const std::vector<std::uint8_t> flags =
                in_owner(self).writeback.still_unchanged(ticket);
            return std::vector<bool>(flags.begin(), flags.end());
          },
          "ticket"_a,
          "Return for each block under writeback whether its contents are unchanged. Call it after "
          "the copy and before storing it under its key: an alloc may have taken the block while "
          "it was read.")
      .def("end_writeback", &end_writeback, "ticket"_a, "copied"_a,
           "End writeback. `copied` has a flag per block: whether a tier has its copy now. Skips "
           "blocks that were reallocated or got another key in the meantime. Returns how many "
           "blocks are clean now.")
      .def_prop_ro(
          "record_bytes", [](const Pool& self) { return self.writeback.record_bytes(); },
          "The size of one block in all buffers and all ranks, in bytes.")
      .def(
          "copy_out",
          [](Pool& self, Integers ids, const std::shared_ptr<Staging>& staging, Integers slots) {
            copy(self, ids, staging, slots, CopyTo::kHost);
          },
          "ids"_a, "staging"_a, "slots"_a,
          "Copy blocks into slots, one each. Blocks, without the GIL. The blocks must be used, "
          "pinned or under writeback. Raises InvalidArgumentError, DriverError or ChannelError.")
      .def(
          "copy_in",
          [](Pool& self, const std::shared_ptr<Staging>& staging, Integers slots, Integers ids) {
            copy(self, ids, staging, slots, CopyTo::kDevice);
          },
          "staging"_a, "slots"_a, "ids"_a,
          "Copy slots into used blocks, one each. Otherwise as copy_out().");
}

}  // namespace kvelastic
