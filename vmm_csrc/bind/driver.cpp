// `kvelastic._vmm`: drivers, geometry and the range with its tensor.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/errors.h"
#include "bind/ids.h"
#include "driver/cuda_driver.h"
#include "driver/fault_driver.h"
#include "driver/guard_driver.h"
#include "driver/host_driver.h"
#include "ledger/ledger.h"
#include "pages/range.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

std::byte* address_of(std::uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);
}

Counts stats_dict(const Driver& driver) {
  const DriverStats stats = driver.stats();
  nb::dict out;
  out["creates"] = stats.creates;
  out["destroys"] = stats.destroys;
  out["maps"] = stats.maps;
  out["unmaps"] = stats.unmaps;
  out["small_pages"] = stats.small_pages;
  return out;
}

/// The whole range as one flat tensor of bytes. The tensor keeps the range alive.
nb::ndarray<std::int8_t, nb::ndim<1>> range_tensor(const std::shared_ptr<Range>& range) {
  auto* keep = new std::shared_ptr<Range>(range);  // owned by the capsule below
  nb::capsule owner(keep,
                    [](void* held) noexcept { delete static_cast<std::shared_ptr<Range>*>(held); });
  const DeviceKind device = range->driver().device();
  const int type =
      device.type == DeviceKind::kCuda ? nb::device::cuda::value : nb::device::cpu::value;
  constexpr std::int64_t kDenseStride = 1;
  return {range->address(), {range->geometry().range_bytes()}, owner,
          {kDenseStride},   nb::dtype<std::int8_t>(),          type,
          device.ordinal};
}

}  // namespace

void bind_driver(nb::module_& m) {
  nb::class_<HostMemory>(
      m, "HostMemory",
      "The memory bounds of the machine and of this process's cgroups. Thread-safe.")
      .def(nb::init<const std::string&>(), "root"_a = "/",
           "`root` is the directory that contains proc and sys.")
      .def(
          "look",
          [](const HostMemory& memory) {
            std::vector<Fields> rooms;
            for (const HostMemory::Room& room : memory.look()) {
              nb::dict out;
              out["where"] = room.where;
              out["total_bytes"] = room.total_bytes;
              out["left_bytes"] = room.left_bytes;
              out["spare_bytes"] = room.spare_bytes();
              rooms.push_back(out);
            }
            return rooms;
          },
          "Read the bounds and return them as dicts, tightest first. `spare_bytes` is `left_bytes` "
          "minus a safety margin.")
      .def(
          "refuse_if_tight",
          [](HostMemory& memory, std::size_t bytes) { check(memory.refuse_if_tight(bytes)); },
          "bytes"_a, "Raise OutOfMemoryError if `bytes` more would leave too little memory.");

  nb::class_<Driver>(
      m, "Driver",
      "The interface to the memory of a host or a GPU; see vmm_csrc/driver/driver.h. Thread-safe.")
      .def_prop_ro("granularity_bytes", &Driver::granularity_bytes)
      .def("stats", &stats_dict)
      .def(
          "drain", [](Driver& d) { check(without_gil([&] { return d.drain(); })); },
          "Block until the device has finished all work submitted so far that may use the pages.")
      .def(
          "reserve",
          [](Driver& d, std::size_t bytes) {
            return reinterpret_cast<std::uintptr_t>(unwrap(d.reserve(bytes)));
          },
          "bytes"_a,
          "Reserve `bytes` of addresses without memory and return the first. Touching them faults.")
      .def(
          "release",
          [](Driver& d, std::uintptr_t at, std::size_t bytes) {
            check(d.release(address_of(at), bytes));
          },
          "address"_a, "bytes"_a)
      .def(
          "create",
          [](Driver& d, std::size_t bytes) {
            return unwrap(without_gil([&] { return d.create(bytes); }));
          },
          "bytes"_a, "Create a page, zeroed on the host, and return its handle. Slow.")
      .def(
          "destroy", [](Driver& d, Handle h, std::size_t bytes) { check(d.destroy(h, bytes)); },
          "handle"_a, "bytes"_a)
      .def(
          "map",
          [](Driver& d, std::uintptr_t at, std::size_t bytes, Handle h) {
            check(d.map(address_of(at), bytes, h));
          },
          "address"_a, "bytes"_a, "handle"_a)
      .def(
          "set_access",
          [](Driver& d, std::uintptr_t at, std::size_t bytes) {
            check(d.set_access(address_of(at), bytes));
          },
          "address"_a, "bytes"_a)
      .def(
          "unmap",
          [](Driver& d, std::uintptr_t at, std::size_t bytes) {
            check(d.unmap(address_of(at), bytes));
          },
          "address"_a, "bytes"_a);

  m.def(
      "HostDriver", []() -> std::shared_ptr<Driver> { return {unwrap(HostDriver::open())}; },
      "Create a driver for the host's memory: one memfd with pages of 2 MiB. Touching unmapped "
      "addresses faults.");

  nb::class_<CudaDriver, Driver>(
      m, "CudaDriver",
      "A driver for a GPU's memory, through CUDA virtual memory. Loads libcuda when it is created.")
      .def(nb::new_([](const std::string& device) -> std::shared_ptr<CudaDriver> {
             return unwrap(without_gil([&] { return CudaDriver::open(device); }));
           }),
           "device"_a = "cuda",
           "`device` is \"cuda\", \"cuda:N\", \"GPU-<uuid>\" or \"MIG-<uuid>\".")
      .def_prop_ro("uuid", &CudaDriver::uuid)
      .def_prop_ro("ordinal", [](const CudaDriver& d) { return d.device().ordinal; })
      .def_prop_ro("total_bytes", [](const CudaDriver& d) { return unwrap(d.total_bytes()); })
      .def_prop_ro("free_bytes", [](const CudaDriver& d) { return unwrap(d.free_bytes()); })
      .def_prop_ro("knows_streams", &CudaDriver::knows_streams,
                   "True if use_streams() has been called.")
      .def(
          "use_streams",
          [](CudaDriver& d, Integers streams) {
            std::vector<cuda::Stream> handles;
            for (const std::int64_t each : integers_of(streams)) {
              handles.push_back(reinterpret_cast<cuda::Stream>(each));
            }
            d.use_streams(std::move(handles));
          },
          "streams"_a,
          "Set the streams whose work uses the pages, as integers. 0 is the legacy default stream; "
          "[] means that no kernel uses the pages. Before the first call, unmapping raises "
          "StreamsUnknownError.")
      .def(
          "export_page", [](CudaDriver& d, Handle h) { return unwrap(d.export_page(h)); },
          "handle"_a, "Return a file descriptor of a page, which the caller closes.")
      .def(
          "import_page", [](CudaDriver& d, int fd) { return unwrap(d.import_page(fd)); }, "fd"_a,
          "Return a handle of another process's page. The caller releases it with destroy().");

  nb::class_<FaultDriver, Driver>(m, "FaultDriver", "A driver that fails chosen calls; for tests.")
      .def(nb::init<std::shared_ptr<Driver>>(), "inner"_a)
      .def("arm", &FaultDriver::arm, "fail_at"_a, "fail_count"_a = 1,
           "Restart the count of calls. Fail `fail_count` calls from number `fail_at` on (1 is the "
           "first call, 0 fails none).")
      .def_prop_ro("calls", &FaultDriver::calls);

  nb::class_<GuardDriver, Driver>(m, "GuardDriver",
                                  "A driver that maps a scratch page at every unmapped address, so "
                                  "that touching it does not fault.")
      .def(
          "__init__",
          [](GuardDriver* self, std::shared_ptr<Driver> inner, std::size_t page_bytes) {
            if (page_bytes == 0 || page_bytes % inner->granularity_bytes() != 0) {
              raise_code("INVALID_ARGUMENT",
                         "page_bytes=" + std::to_string(page_bytes) +
                             " is not accepted; it must be a positive multiple of " +
                             std::to_string(inner->granularity_bytes()));
            }
            new (self) GuardDriver(std::move(inner), page_bytes);
          },
          "inner"_a, "page_bytes"_a, "Every page of `inner` must have `page_bytes` bytes.");

  nb::class_<Geometry>(m, "Geometry",
                       "The locations of block ids in pages, as computed by kvelastic.pool.layout.")
      .def(
          "__init__",
          [](Geometry* self, std::uint64_t pages, std::uint64_t extent_bytes,
             std::uint64_t block_bytes, std::uint64_t blocks_per_page,
             std::uint64_t extents_per_page, std::uint64_t extent_stride_bytes,
             std::uint64_t buffers_per_extent) {
            const Geometry geometry{
                pages,       extents_per_page, extent_bytes,      extent_stride_bytes,
                block_bytes, blocks_per_page,  buffers_per_extent};
            // 1, because only the driver knows its granularity. Range.reserve checks that.
            check(geometry.check(1));
            new (self) Geometry(geometry);
          },
          nb::kw_only(), "pages"_a, "extent_bytes"_a, "block_bytes"_a, "blocks_per_page"_a,
          "extents_per_page"_a = 1, "extent_stride_bytes"_a = 0, "buffers_per_extent"_a = 1)
      .def_ro("pages", &Geometry::pages)
      .def_ro("extents_per_page", &Geometry::extents_per_page)
      .def_ro("extent_bytes", &Geometry::extent_bytes)
      .def_ro("extent_stride_bytes", &Geometry::extent_stride_bytes)
      .def_ro("block_bytes", &Geometry::block_bytes)
      .def_ro("blocks_per_page", &Geometry::blocks_per_page)
      .def_ro("buffers_per_extent", &Geometry::buffers_per_extent)
      .def_prop_ro("page_bytes", &Geometry::page_bytes)
      .def_prop_ro("range_bytes", &Geometry::range_bytes)
      .def("first_id", &Geometry::first_id, "page"_a);

  nb::class_<Range>(m, "Range",
                    "Reserved addresses and the pages mapped there. Any thread. A batch of pages "
                    "is all or nothing.")
      .def_static(
          "reserve",
          [](std::shared_ptr<Driver> driver, const Geometry& geometry) {
            return std::shared_ptr<Range>(unwrap(Range::reserve(std::move(driver), geometry)));
          },
          "driver"_a, "geometry"_a, "Reserve the addresses. Uses no memory.")
      .def(
          "map",
          [](Range& r, Integers pages) {
            const std::vector<std::uint32_t> batch = pages_of(pages);
            check(without_gil([&r = in_owner(r), &batch] { return r.map(batch); }));
          },
          "pages"_a, "Map unmapped pages. On the host, new pages are zeroed. Blocks.")
      .def(
          "check_map",
          [](const Range& r, Integers pages) {
            const std::vector<std::uint32_t> batch = pages_of(pages);
            check(without_gil([&r = in_owner(r), &batch] { return r.check_map(batch); }));
          },
          "pages"_a,
          "Raise the errors that map() would raise for these pages, except for a lack of memory.")
      .def(
          "unmap",
          [](Range& r, Integers pages, bool destroy) {
            const std::vector<std::uint32_t> batch = pages_of(pages);
            check(without_gil([&r = in_owner(r), &batch, destroy] {
              return r.unmap(batch, destroy ? Afterwards::kDestroy : Afterwards::kRecycle);
            }));
          },
          "pages"_a, nb::kw_only(), "destroy"_a = false,
          "Unmap pages after the device has finished the work submitted so far. Their handles are "
          "kept for the next map, or with `destroy` destroyed. Blocks.")
      .def(
          "copy",
          [](Range& r, Integers from, Integers to) {
            const std::vector<std::int64_t> sources = integers_of(from);
            const std::vector<std::int64_t> targets = integers_of(to);
            if (sources.size() != targets.size()) {
              raise_code("INVALID_ARGUMENT", "as many blocks to copy from as to copy to");
            }
            std::vector<BlockMove> moves;
            for (std::size_t i = 0; i < sources.size(); ++i) {
              moves.push_back({sources[i], targets[i]});
            }
            check(without_gil([&r = in_owner(r), &moves] { return r.copy(moves); }));
          },
          "sources"_a, "targets"_a,
          "Copy blocks of mapped pages, in every buffer. Blocks until the copy is complete.")
      .def(
          "trim", [](Range& r) { check(without_gil([&r = in_owner(r)] { return r.trim(); })); },
          "Destroy the handles that unmap() has kept.")
      .def(
          "hold_grant_of",
          [](Range& r, std::shared_ptr<LedgerMember> member) {
            in_owner(r).hold_grant_of(std::move(member));
          },
          "member"_a,
          "Keep `member` in its ledger until the range has released its memory, which is when its "
          "last user is gone.")
      .def("tensor", &range_tensor, nb::sig("def tensor(self) -> typing.Any"),
           "Return the whole range as a flat int8 tensor (DLPack, no copy). Touching unmapped "
           "pages faults.")
      .def(
          "is_mapped", [](const Range& r, PageIndex page) { return in_owner(r).is_mapped(page); },
          "page"_a)
      .def(
          "handles",
          [](Range& r, Integers pages) {
            const std::vector<std::uint32_t> batch = pages_of(pages);
            return unwrap(without_gil([&r = in_owner(r), &batch] { return r.handles(batch); }));
          },
          "pages"_a, "Return the driver's handles of mapped pages, for another process to import.")
      .def(
          "generations",
          [](const Range& r, Integers pages) {
            const std::vector<std::uint32_t> batch = pages_of(pages);
            return without_gil([&r = in_owner(r), &batch] { return r.generations(batch); });
          },
          "pages"_a, "Return how many times each page has been unmapped.")
      .def(
          "ring_at_unmap", [](Range& r, int bell) { check(in_owner(r).ring_at_unmap(bell)); },
          "bell"_a,
          "From now on, add 1 to an eventfd after pages of handles() have been unmapped; "
          "take_unmapped() returns them. The descriptor stays the caller's.")
      .def(
          "take_unmapped",
          [](Range& r) { return without_gil([&r = in_owner(r)] { return r.take_unmapped(); }); },
          "Return the pages of handles() that have been unmapped since the last call.")
      .def_prop_ro("mapped_pages", &Range::mapped_pages)
      .def_prop_ro("held_bytes", &Range::held_bytes)
      .def_prop_ro("failed", &Range::failed)
      .def_prop_ro("geometry", &Range::geometry)
      .def_prop_ro("range_bytes", [](const Range& r) { return r.geometry().range_bytes(); })
      .def_prop_ro("address",
                   [](const Range& r) { return reinterpret_cast<std::uintptr_t>(r.address()); })
      .def("check_integrity", [](const Range& r) { check(in_owner(r).check_integrity()); });
}

}  // namespace kvelastic
