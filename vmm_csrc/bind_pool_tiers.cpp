// `kvelastic._vmm`: what tiers need of a pool.
#include "bind_pool_tiers.h"

#include <nanobind/stl/shared_ptr.h>

#include <vector>

#include "bind_errors.h"
#include "bind_ids.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

std::vector<BlockSlot> block_slots_of(nb::handle ids, nb::handle slots) {
  const std::vector<std::int64_t> blocks = integers_of(ids);
  const std::vector<std::int64_t> places = integers_of(slots);
  if (blocks.size() != places.size()) {
    raise_code("INVALID_ARGUMENT", std::to_string(blocks.size()) + " blocks and " +
                                       std::to_string(places.size()) + " slots; give one for each");
  }
  std::vector<BlockSlot> out;
  out.reserve(blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    out.push_back({blocks[i], static_cast<std::uint64_t>(places[i])});
  }
  return out;
}

void copy(Pool& pool, nb::handle ids, const std::shared_ptr<Staging>& staging, nb::handle slots,
          CopyTo to) {
  const std::vector<BlockSlot> blocks = block_slots_of(ids, slots);
  check(without_gil([&pool = own(pool), &blocks, &staging, to] {
    return pool.copy_records(blocks, staging, to);
  }));
}

}  // namespace

void bind_pool_tiers(nb::class_<Pool>& pool) {
  pool.def_prop_ro("record_bytes", &Pool::record_bytes,
                   "Bytes of one block in all buffers and all ranks.")
      .def(
          "copy_out",
          [](Pool& self, nb::handle ids, const std::shared_ptr<Staging>& staging,
             nb::handle slots) { copy(self, ids, staging, slots, CopyTo::kHost); },
          "ids"_a, "staging"_a, "slots"_a,
          "Copy blocks into slots, one each; blocks, without the GIL. They must be the caller's: "
          "in "
          "use, pinned, or leaving. Raises InvalidArgumentError, DriverError, ChannelError.")
      .def(
          "copy_in",
          [](Pool& self, const std::shared_ptr<Staging>& staging, nb::handle slots,
             nb::handle ids) { copy(self, ids, staging, slots, CopyTo::kDevice); },
          "staging"_a, "slots"_a, "ids"_a, "The way back, into blocks in use.");
}

}  // namespace kvelastic
