// `kvelastic._vmm`: staging between blocks and stores.
#include "pages/staging.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <cstring>
#include <string>

#include "base/huge_pages.h"
#include "bind/errors.h"
#include "bind/gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

/// Raises for an invalid slot, and in a forked child: the memory is not mapped there, and reading
/// it would crash the child.
void refuse_slot(const Staging& staging, std::uint64_t slot) {
  check(staging.made_by().refuse_in_a_child());
  if (slot < staging.slots()) return;
  raise_code("INVALID_ARGUMENT", "slot " + std::to_string(slot) + " is not one of the staging's " +
                                     std::to_string(staging.slots()));
}

/// Exports the buffer of one object. It keeps the staging alive while a view exists.
struct Record {
  std::shared_ptr<Staging> staging;
  std::uint64_t slot;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Record* record = nb::inst_ptr<Record>(nb::handle(self));
  const std::span<std::byte> bytes = record->staging->record(record->slot);
  constexpr int kWritable = 0;
  return PyBuffer_FillInfo(view, self, bytes.data(), static_cast<Py_ssize_t>(bytes.size()),
                           kWritable, flags);
}

PyType_Slot record_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)},
                              {0, nullptr}};

nb::memoryview view_of(std::shared_ptr<Staging> staging, std::uint64_t slot) {
  refuse_slot(*staging, slot);
  return nb::memoryview(nb::cast(Record{std::move(staging), slot}));
}

}  // namespace

void bind_staging(nb::module_& m) {
  nb::class_<Record>(m, "StagedRecord", nb::type_slots(record_slots),
                     "The object in one slot of a Staging, as a buffer; see Staging.view().");
  nb::class_<Staging>(m, "Staging",
                      "Host memory with one object per slot, for copies between blocks and stores; "
                      "see vmm_csrc/pages/staging.h.")
      .def(nb::new_([](std::uint64_t slots, std::uint64_t record_bytes) {
             return std::shared_ptr<Staging>(unwrap(Staging::create(slots, record_bytes)));
           }),
           "slots"_a, "record_bytes"_a)
      .def_prop_ro("slots", &Staging::slots)
      .def_prop_ro("record_bytes", &Staging::record_bytes)
      .def("view", &view_of, "slot"_a,
           "Return a writable memoryview of the object in a slot. The view keeps the memory alive. "
           "Raises InvalidArgumentError for an invalid slot, and DeviceUnavailableError in a "
           "forked child, which does not have the memory.")
      .def(
          "address",
          [](const Staging& staging, std::uint64_t slot) {
            refuse_slot(staging, slot);
            return reinterpret_cast<std::uintptr_t>(staging.record(slot).data());
          },
          "slot"_a,
          "Return the address of the object in a slot, a multiple of 4096. Raises as view().")
      .def(
          "populate",
          [](const Staging& staging) {
            check(staging.made_by().refuse_in_a_child());
            const Populated populated = without_gil([&] { return populate(staging.memory()); });
            if (populated.error == 0) return populated.is_huge;
            raise_code("OUT_OF_MEMORY",
                       "allocating " + std::to_string(staging.memory().size()) +
                           " bytes of staging memory failed: " + std::strerror(populated.error) +
                           "; lower KVELASTIC_TIER_STAGING");
          },
          "Allocate all memory now, in huge pages if the kernel has them: other processes copy it "
          "twice as fast. Returns whether it has. Blocks, without the GIL. Raises "
          "OutOfMemoryError, and DeviceUnavailableError in a forked child.");
}

}  // namespace kvelastic
