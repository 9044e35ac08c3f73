// `kvelastic._vmm`: the reclaim policy, and the account of a device's memory.
#include "ledger/reclaim.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bind/errors.h"
#include "ledger/device_account.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

using Contenders = nb::typed<nb::sequence, nb::object>;
using Requests = std::vector<std::tuple<std::size_t, std::uint64_t, std::uint32_t>>;

// Converts the contenders of `kvelastic.reclaim`.
std::vector<Contender> contenders_of(nb::sequence sequence) {
  std::vector<Contender> all;
  for (nb::handle item : sequence) {
    Contender c;
    c.granted_bytes = nb::cast<std::uint64_t>(item.attr("granted_bytes"));
    c.min_bytes = nb::cast<std::uint64_t>(item.attr("min_bytes"));
    c.priority = nb::cast<std::int64_t>(item.attr("priority"));
    c.parked_bytes = nb::cast<std::uint64_t>(item.attr("parked_bytes"));
    c.cached_bytes = nb::cast<std::uint64_t>(item.attr("cached_bytes"));
    c.page_bytes = nb::cast<std::uint64_t>(item.attr("page_bytes"));
    c.idle_ns = nb::cast<std::uint64_t>(item.attr("idle_ns"));
    c.request_bytes = nb::cast<std::uint64_t>(item.attr("request_bytes"));
    c.request_ns = nb::cast<std::uint64_t>(item.attr("request_ns"));
    c.reclaim_bytes = nb::cast<std::uint64_t>(item.attr("reclaim_bytes"));
    c.reclaim_ns = nb::cast<std::uint64_t>(item.attr("reclaim_ns"));
    all.push_back(c);
  }
  return all;
}

Requests requests_of(const std::vector<ReclaimRequest>& plan) {
  Requests out;
  for (const ReclaimRequest& request : plan) {
    out.emplace_back(request.contender, request.bytes, static_cast<std::uint32_t>(request.depth));
  }
  return out;
}

Requests plan(Contenders contenders, std::size_t requester, std::uint64_t free_bytes,
              std::uint64_t capacity_bytes) {
  const std::vector<Contender> all = contenders_of(contenders);
  if (requester >= all.size())
    raise_code("INVALID_ARGUMENT", "requester is no index of the contenders");
  return requests_of(plan_reclaim(all, requester, free_bytes, capacity_bytes, ReclaimRules{}));
}

Requests excess(Contenders contenders, std::uint64_t excess_bytes, std::uint64_t capacity_bytes) {
  return requests_of(
      plan_excess(contenders_of(contenders), excess_bytes, capacity_bytes, ReclaimRules{}));
}

std::uint64_t kept(Contenders contenders, std::size_t self, std::uint64_t capacity_bytes) {
  const std::vector<Contender> all = contenders_of(contenders);
  if (self >= all.size()) raise_code("INVALID_ARGUMENT", "self is no index of the contenders");
  return kept_bytes(all, self, capacity_bytes, ReclaimRules{});
}

}  // namespace

void bind_reclaim(nb::module_& m) {
  const ReclaimRules rules;
  m.attr("RECLAIM_IDLE_NS") = rules.idle_ns;
  m.attr("RECLAIM_PATIENCE_NS") = rules.patience_ns;
  m.attr("RECLAIM_FAIR_CACHED_NS") = rules.fair_cached_ns;
  m.attr("RECLAIM_FAIR_IN_USE_NS") = rules.fair_in_use_ns;
  m.attr("RECLAIM_RESERVE_WAIT_NS") = rules.reserve_wait_ns;
  m.attr("RECLAIM_REQUEST_EXPIRY_NS") = rules.request_expiry_ns;

  m.def("plan_reclaim", &plan, "contenders"_a, "requester"_a, "free_bytes"_a, "capacity_bytes"_a,
        "Plan the reclaim requests for contender number `requester`. Returns (contender, bytes, "
        "depth) "
        "tuples in the order of sending; see vmm_csrc/ledger/reclaim.h.");
  m.def("kept_bytes", &kept, "contenders"_a, "self"_a, "capacity_bytes"_a,
        "Return how many released bytes contender number `self` must leave to waiting ones; see "
        "vmm_csrc/ledger/reclaim.h.");
  m.def("plan_excess", &excess, "contenders"_a, "excess_bytes"_a, "capacity_bytes"_a,
        "Plan the reclaim requests that reduce the contenders' total by `excess_bytes`. Returns "
        "(contender, bytes, depth) tuples; see vmm_csrc/ledger/reclaim.h.");

  m.def(
      "left_for_caches",
      [](std::uint64_t capacity_bytes, std::uint64_t total_bytes, std::uint64_t beside_bytes) {
        return DeviceMemorySize{capacity_bytes, total_bytes}.left_for_caches(beside_bytes);
      },
      "capacity_bytes"_a, "total_bytes"_a, "beside_bytes"_a,
      "Return how many bytes of the capacity are left for caches if `beside_bytes` are reserved or "
      "used by others; see vmm_csrc/ledger/device_account.h.");
  m.def(
      "has_room_for",
      [](std::uint64_t capacity_bytes, std::uint64_t total_bytes, std::uint64_t guaranteed_bytes,
         std::uint64_t reserved_bytes) {
        return DeviceMemorySize{capacity_bytes, total_bytes}.has_room_for(guaranteed_bytes,
                                                                          reserved_bytes);
      },
      "capacity_bytes"_a, "total_bytes"_a, "guaranteed_bytes"_a, "reserved_bytes"_a,
      "Return True if guarantees and reserves together fit into the device.");
  m.def(
      "check_account",
      [](std::uint64_t capacity_bytes, std::uint64_t total_bytes, std::uint64_t granted_bytes,
         std::uint64_t guaranteed_bytes, std::uint64_t reserved_bytes) {
        check(check_account({capacity_bytes, total_bytes}, granted_bytes, guaranteed_bytes,
                            reserved_bytes));
      },
      "capacity_bytes"_a, "total_bytes"_a, "granted_bytes"_a, "guaranteed_bytes"_a,
      "reserved_bytes"_a, "Raise IntegrityError if the sums exceed the device's memory.");
}

}  // namespace kvelastic
