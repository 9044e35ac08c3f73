// `kvelastic._vmm`: copies between blocks in an engine's own tensors and staging.
#include "pool/engine_blocks.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bind/errors.h"
#include "bind/ids.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

constexpr std::size_t kPartFields = 5;
using Part = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;
using Parts = nb::typed<nb::handle, std::vector<Part>>;

std::uint64_t natural(std::int64_t value) {
  if (value < 0) {
    raise_code("INVALID_ARGUMENT", std::to_string(value) + " is no address, size or slot");
  }
  return static_cast<std::uint64_t>(value);
}

std::vector<BlockPart> parts_of(nb::handle sequence) {
  std::vector<BlockPart> parts;
  for (nb::handle each : nb::borrow<nb::sequence>(sequence)) {
    const std::vector<std::int64_t> fields = integers_of(each);
    if (fields.size() != kPartFields) {
      raise_code("INVALID_ARGUMENT",
                 "a part is (address, block_stride_bytes, row_bytes, rows, row_stride_bytes)");
    }
    parts.push_back({reinterpret_cast<std::byte*>(natural(fields[0])), natural(fields[1]),
                     natural(fields[2]), natural(fields[3]), natural(fields[4])});
  }
  return parts;
}

}  // namespace

void bind_engine_blocks(nb::module_& m) {
  nb::class_<EngineBlocks>(m, "EngineBlocks",
                           "Blocks in an engine's own tensors; see vmm_csrc/pool/engine_blocks.h. "
                           "The caller keeps the tensors alive while this is used. Any thread.")
      .def(nb::new_([](std::shared_ptr<Driver> driver, Parts parts, std::int64_t blocks) {
             return std::shared_ptr<EngineBlocks>(
                 unwrap(EngineBlocks::create(std::move(driver), parts_of(parts), natural(blocks))));
           }),
           "driver"_a, "parts"_a, "blocks"_a,
           "`parts` has (address, block_stride_bytes, row_bytes, rows, row_stride_bytes) of each "
           "part, in the order in which an object stores them. Raises InvalidArgumentError.")
      .def_prop_ro("blocks", &EngineBlocks::blocks)
      .def_prop_ro("record_bytes", &EngineBlocks::record_bytes)
      .def(
          "copy_out",
          [](EngineBlocks& engine, Integers ids, const std::shared_ptr<Staging>& staging,
             Integers slots, std::int64_t offset_bytes) {
            const std::vector<BlockSlot> pairs = block_slots_of(ids, slots);
            const std::uint64_t offset = natural(offset_bytes);
            check(without_gil([&] { return engine.copy(pairs, staging, offset, CopyTo::kHost); }));
          },
          "ids"_a, "staging"_a, "slots"_a, "offset_bytes"_a = 0,
          "Copy blocks to slots of a Staging, at `offset_bytes` of each object. Blocks, without "
          "the GIL. Raises InvalidArgumentError with nothing copied, or DriverError if the device "
          "fails.")
      .def(
          "copy_in",
          [](EngineBlocks& engine, const std::shared_ptr<Staging>& staging, Integers slots,
             Integers ids, std::int64_t offset_bytes) {
            const std::vector<BlockSlot> pairs = block_slots_of(ids, slots);
            const std::uint64_t offset = natural(offset_bytes);
            check(
                without_gil([&] { return engine.copy(pairs, staging, offset, CopyTo::kDevice); }));
          },
          "staging"_a, "slots"_a, "ids"_a, "offset_bytes"_a = 0,
          "Copy slots of a Staging to blocks. Otherwise as copy_out().");
}

}  // namespace kvelastic
