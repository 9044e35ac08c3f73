// `kvelastic._vmm.DeviceSet`: the devices of an instance's pages, with one ledger member each.
#include "ledger/device_set.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/signatures.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

/// (total, free) bytes by rank; empty: unknown.
using DevicesSeen = std::vector<std::optional<std::pair<std::uint64_t, std::uint64_t>>>;

const char* text_of(Sight sight) {
  switch (sight) {
    case Sight::kNone:
      return "none";
    case Sight::kChanged:
      return "changed";
    case Sight::kBounded:
      return "bounded";
    case Sight::kExact:
      return "exact";
  }
  return "?";
}

std::shared_ptr<DeviceSet> make_device_set(
    nb::typed<nb::sequence, std::pair<std::shared_ptr<LedgerMember>, std::vector<std::uint32_t>>>
        placements,
    std::uint64_t copy_bytes) {
  std::vector<Placement> all;
  for (nb::handle item : placements) {
    const auto pair = nb::cast<nb::tuple>(item);
    if (pair.size() != 2) raise_code("INVALID_ARGUMENT", "a placement is (member, ranks)");
    all.push_back({nb::cast<std::shared_ptr<LedgerMember>>(pair[0]),
                   nb::cast<std::vector<std::uint32_t>>(pair[1])});
  }
  return unwrap(DeviceSet::create(std::move(all), copy_bytes));
}

DeviceSet& in_owner(DeviceSet& device_set) {
  check(device_set.all().front().member->refuse_in_a_child());
  return device_set;
}

void wait_for_claim(DeviceSet& device_set, DeviceSet::Claimed claimed,
                    std::chrono::nanoseconds timeout) {
  Status there = ok();
  {
    const GilReleased unlocked;
    there = device_set.wait_for_claim(claimed, timeout);
  }
  check(there);
}

void reserve(DeviceSet& device_set, Counts bytes) {
  std::vector<std::uint64_t> by_placement;
  std::size_t known = 0;
  for (const Placement& placement : device_set.all()) {
    const std::string device(placement.member->device());
    const bool named = bytes.contains(device.c_str());
    known += named ? 1 : 0;
    by_placement.push_back(named ? nb::cast<std::uint64_t>(bytes[device.c_str()])
                                 : placement.member->reserve_bytes());
  }
  if (known != bytes.size()) {
    std::string names;
    for (const Placement& placement : device_set.all()) {
      names += (names.empty() ? "" : ", ") + std::string(placement.member->device());
    }
    raise_code("INVALID_ARGUMENT", "a reserve was given for another device than " + names);
  }
  const DeviceSet::Claimed claimed = unwrap(device_set.claim_reserve(std::move(by_placement)));
  wait_for_claim(device_set, claimed, std::chrono::nanoseconds(device_set.rules().reserve_wait_ns));
}

std::vector<std::pair<std::string, std::size_t>> devices(const DeviceSet& device_set) {
  std::vector<std::pair<std::string, std::size_t>> out;
  for (const Placement& placement : device_set.all()) {
    out.emplace_back(placement.member->device(), placement.ranks.size());
  }
  return out;
}

}  // namespace

void bind_device_set(nb::module_& m) {
  nb::class_<DeviceSet>(
      m, "DeviceSet",
      "The devices that hold an instance's pages, with the instance's member in each device's "
      "ledger; see vmm_csrc/ledger/device_set.h. Every request goes to all ledgers and is all or "
      "nothing. Any thread.")
      .def(nb::new_(&make_device_set), "placements"_a, "copy_bytes"_a,
           "`placements` has one (member, ranks whose pages lie there) per device. `copy_bytes` is "
           "the size of one rank's copy of a page. Raises InvalidArgumentError.")
      .def_prop_ro("devices", &devices, "(name, copies of each page) per device, ordered by name.")
      .def_prop_ro("page_bytes", &DeviceSet::page_bytes,
                   "The size of a page with all its copies on all devices, in bytes.")
      .def(
          "grant",
          [](DeviceSet& device_set, std::uint64_t pages) {
            return in_owner(device_set).grant(pages);
          },
          "pages"_a,
          "Take up to `pages` pages, as many as all devices have, and return their number.")
      .def(
          "arrived",
          [](DeviceSet& device_set, std::uint64_t pages) { in_owner(device_set).arrived(pages); },
          "pages"_a, "Report that granted pages are mapped.")
      .def(
          "leaving",
          [](DeviceSet& device_set, std::uint64_t pages) { in_owner(device_set).leaving(pages); },
          "pages"_a, "Report that mapped pages are about to be unmapped.")
      .def(
          "give_back",
          [](DeviceSet& device_set, std::uint64_t pages) { in_owner(device_set).give_back(pages); },
          "pages"_a)
      .def("room", &DeviceSet::room, "Return how many pages grant() could take now.")
      .def("reach", &DeviceSet::reach,
           "Return how many pages could become available: room() plus what other instances would "
           "have to release.")
      .def_prop_ro("granted_bytes", &DeviceSet::granted_bytes)
      .def_prop_ro("capacity_bytes", &DeviceSet::capacity_bytes,
                   "The most that the instance could hold without other instances, in bytes.")
      .def(
          "see_devices",
          [](DeviceSet& device_set, const std::function<DevicesSeen()>& look) {
            return text_of(in_owner(device_set).see_devices([&look] {
              std::vector<std::optional<DeviceMemory>> seen;
              for (const auto& one : look()) {
                seen.push_back(one ? std::optional(DeviceMemory{one->first, one->second})
                                   : std::nullopt);
              }
              return seen;
            }));
          },
          "look"_a,
          "Record in the ledgers how much memory other processes use. `look` returns (total, free) "
          "bytes of each rank's device, or None where unknown. Returns how certain the result is: "
          "none, changed, bounded or exact.")
      .def(
          "set_min",
          [](DeviceSet& device_set, std::uint64_t bytes) { check(device_set.set_min(bytes)); },
          "bytes"_a,
          "Set the guarantee of the whole instance, in bytes. Raises GuaranteeError; then nothing "
          "has changed.")
      .def_prop_ro("min_bytes", &DeviceSet::min_bytes)
      .def(
          "set_priority",
          [](DeviceSet& device_set, std::int64_t priority) {
            check(device_set.set_priority(priority));
          },
          "priority"_a)
      .def("reserve", &reserve, "bytes"_a,
           "Set the reserves: the memory besides grants, in bytes by device. Devices that are not "
           "named keep theirs. For an increase, request memory from others and block until it is "
           "available, at most five seconds. Raises GuaranteeError, ReserveError or "
           "InvalidArgumentError; then nothing has changed.")
      .def(
          "wake",
          [](DeviceSet& device_set, double timeout_s) {
            const DeviceSet::Claimed claimed = unwrap(device_set.claim_wake());
            wait_for_claim(device_set, claimed,
                           std::chrono::duration_cast<std::chrono::nanoseconds>(
                               std::chrono::duration<double>(timeout_s)));
          },
          "timeout_s"_a,
          "Claim the guarantee and the reserve again, as Pool.wake does; for tests. Blocks.")
      .def(
          "fall_asleep", [](DeviceSet& device_set) { in_owner(device_set).fall_asleep(); },
          "Exclude guarantee and reserve from the sums until the instance wakes.")
      .def_prop_ro("is_asleep", &DeviceSet::is_asleep)
      .def(
          "request_memory",
          [](DeviceSet& device_set, std::uint64_t pages) {
            return in_owner(device_set).request_memory(pages);
          },
          "pages"_a,
          "Request memory for `pages` pages in each ledger that lacks some. Returns False if on "
          "one of those devices no instance has to release memory.")
      .def("end_memory_request",
           [](DeviceSet& device_set) { in_owner(device_set).end_memory_request(); })
      .def(
          "open_reclaim",
          [](const DeviceSet& device_set) {
            const DeviceSet::OpenReclaim open = device_set.open_reclaim();
            return std::pair(open.pages, static_cast<std::uint32_t>(open.depth));
          },
          "Return (pages, depth) that other instances request from this one.")
      .def(
          "add_worker",
          [](DeviceSet& device_set, std::uint32_t rank, std::uint32_t pid,
             std::uint64_t start_time_ticks) {
            check(device_set.add_worker(rank, pid, start_time_ticks));
          },
          "rank"_a, "pid"_a, "start_time_ticks"_a,
          "Register the process that maps the pages of a rank. The grant on the rank's device "
          "stays until that process has ended.")
      .def(
          "check_integrity",
          [](const DeviceSet& device_set, std::uint64_t pages) {
            check(device_set.check_integrity(pages));
          },
          "pages"_a, "Raise IntegrityError unless every ledger has granted exactly these pages.");
}

}  // namespace kvelastic
