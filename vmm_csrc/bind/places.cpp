// `kvelastic._vmm.Places`: where an instance's pages lie, one member for each device's ledger.
#include "ledger/places.h"

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

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

/// (total, free) bytes by rank.
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

std::shared_ptr<Places> make_places(nb::sequence places, std::uint64_t copy_bytes) {
  std::vector<Place> all;
  for (nb::handle item : places) {
    const auto pair = nb::cast<nb::tuple>(item);
    if (pair.size() != 2) raise_code("INVALID_ARGUMENT", "a place is (member, ranks)");
    all.push_back({nb::cast<std::shared_ptr<LedgerMember>>(pair[0]),
                   nb::cast<std::vector<std::uint32_t>>(pair[1])});
  }
  return unwrap(Places::create(std::move(all), copy_bytes));
}

Places& own(Places& places) {
  check(places.all().front().member->refuse_in_a_child());
  return places;
}

void wait_for_claim(Places& places, Places::Claimed claimed, std::chrono::nanoseconds timeout) {
  Status there = ok();
  {
    const GilReleased unlocked;
    there = places.wait_for_claim(claimed, timeout);
  }
  check(there);
}

void reserve(Places& places, nb::dict bytes) {
  std::vector<std::uint64_t> by_place;
  std::size_t known = 0;
  for (const Place& place : places.all()) {
    const std::string device(place.member->device());
    const bool named = bytes.contains(device.c_str());
    known += named ? 1 : 0;
    by_place.push_back(named ? nb::cast<std::uint64_t>(bytes[device.c_str()])
                             : place.member->reserve_bytes());
  }
  if (known != bytes.size()) {
    std::string names;
    for (const Place& place : places.all()) {
      names += (names.empty() ? "" : ", ") + std::string(place.member->device());
    }
    raise_code("INVALID_ARGUMENT", "a reserve was given for another device than " + names);
  }
  const Places::Claimed claimed = unwrap(places.ask_to_reserve(std::move(by_place)));
  wait_for_claim(places, claimed, std::chrono::nanoseconds(places.rules().reserve_wait_ns));
}

nb::list devices(const Places& places) {
  nb::list out;
  for (const Place& place : places.all()) {
    out.append(nb::make_tuple(std::string(place.member->device()), place.ranks.size()));
  }
  return out;
}

}  // namespace

void bind_places(nb::module_& m) {
  nb::class_<Places>(
      m, "Places",
      "Where an instance's pages lie, for its pool; see vmm_csrc/ledger/places.h. What is "
      "asked of\nthe ledgers is asked of all of them, and is all or nothing. Any "
      "thread.")
      .def(nb::new_(&make_places), "places"_a, "copy_bytes"_a,
           "`places` are (member, ranks whose pages lie there), one for each device; `copy_bytes` "
           "is\nwhat one rank's copy of a page takes. Raises InvalidArgumentError.")
      .def_prop_ro("devices", &devices, "(name, copies of each page), in the order of their names.")
      .def_prop_ro("page_bytes", &Places::page_bytes, "What one page costs all devices together.")
      .def(
          "grant", [](Places& places, std::uint64_t pages) { return own(places).grant(pages); },
          "pages"_a, "Take as many of `pages` pages as all devices have; returns how many.")
      .def(
          "arrived", [](Places& places, std::uint64_t pages) { own(places).arrived(pages); },
          "pages"_a, "Pages that were granted are mapped.")
      .def(
          "leaving", [](Places& places, std::uint64_t pages) { own(places).leaving(pages); },
          "pages"_a, "Pages that are mapped are about to be unmapped.")
      .def(
          "give_back", [](Places& places, std::uint64_t pages) { own(places).give_back(pages); },
          "pages"_a)
      .def("room", &Places::room, "Pages that grant() would give now.")
      .def("reach", &Places::reach, "The same with what others would have to give up.")
      .def_prop_ro("granted_bytes", &Places::granted_bytes)
      .def_prop_ro("capacity_bytes", &Places::capacity_bytes,
                   "What the instance could hold, if it were alone.")
      .def(
          "see_devices",
          [](Places& places, const std::function<DevicesSeen()>& look) {
            return text_of(own(places).see_devices([&look] {
              std::vector<std::optional<DeviceMemory>> seen;
              for (const auto& one : look()) {
                seen.push_back(one ? std::optional(DeviceMemory{one->first, one->second})
                                   : std::nullopt);
              }
              return seen;
            }));
          },
          "look"_a,
          "Tell the ledgers what strangers hold, from what `look` answers: (total, free) bytes of\n"
          "each rank's device. Returns how certain that is: none, changed, bounded, exact.")
      .def(
          "set_min", [](Places& places, std::uint64_t bytes) { check(places.set_min(bytes)); },
          "bytes"_a,
          "The guarantee of all places together. Raises GuaranteeError; nothing has changed then.")
      .def_prop_ro("min_bytes", &Places::min_bytes)
      .def(
          "set_priority",
          [](Places& places, std::int64_t priority) { check(places.set_priority(priority)); },
          "priority"_a)
      .def("reserve", &reserve, "bytes"_a,
           "Say what this member has beside its grants: bytes by device; the other devices stay.\n"
           "For more than before others are asked, and waited for, five seconds at most. Raises\n"
           "GuaranteeError, ReserveError, InvalidArgumentError; nothing has changed then.")
      .def(
          "wake",
          [](Places& places, double timeout_s) {
            const Places::Claimed claimed = unwrap(places.ask_to_wake());
            wait_for_claim(places, claimed,
                           std::chrono::duration_cast<std::chrono::nanoseconds>(
                               std::chrono::duration<double>(timeout_s)));
          },
          "timeout_s"_a, "Have guarantee and reserve count again, as Pool.wake; for tests.")
      .def(
          "fall_asleep", [](Places& places) { own(places).fall_asleep(); },
          "Guarantee and reserve count for nothing until it wakes.")
      .def_prop_ro("is_asleep", &Places::is_asleep)
      .def(
          "ask", [](Places& places, std::uint64_t pages) { return own(places).ask(pages); },
          "pages"_a,
          "Say that pages are missing, where they are. False: on one device nobody has to give.")
      .def("stop_asking", [](Places& places) { own(places).stop_asking(); })
      .def(
          "wanted",
          [](const Places& places) {
            const Places::Wanted wanted = places.wanted();
            return nb::make_tuple(wanted.pages, static_cast<std::uint32_t>(wanted.depth));
          },
          "(pages, depth) that others ask of this one.")
      .def(
          "add_worker",
          [](Places& places, std::uint32_t rank, std::uint32_t pid,
             std::uint64_t start_time_ticks) {
            check(places.add_worker(rank, pid, start_time_ticks));
          },
          "rank"_a, "pid"_a, "start_time_ticks"_a,
          "Name the process that maps the pages of a rank: what its device has granted stays until "
          "it\nis gone.")
      .def(
          "check_integrity",
          [](const Places& places, std::uint64_t pages) { check(places.check_integrity(pages)); },
          "pages"_a, "Whether every ledger has granted just these pages. Raises IntegrityError.");
}

}  // namespace kvelastic
