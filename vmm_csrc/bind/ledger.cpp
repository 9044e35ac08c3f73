// `kvelastic._vmm`: the ledger of a device.
#include "ledger/ledger.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "bind/control_block.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/liveness.h"
#include "bind/signatures.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

template <std::size_t N>
std::array<char, N> padded(const std::string& text) {
  std::array<char, N> out{};
  std::memcpy(out.data(), text.data(), std::min(N, text.size()));
  return out;
}

constexpr double kNsPerSecond = 1e9;

double seconds(std::uint64_t ns) {
  return static_cast<double>(ns) / kNsPerSecond;
}

nb::dict entry_dict(const LedgerEntry& entry) {
  nb::dict out;
  out["slot"] = entry.slot;
  out["name"] = text(entry.identity.name);
  out["uuid"] = nb::bytes(entry.identity.uuid.data(), entry.identity.uuid.size());
  out["pid"] = entry.identity.pid;
  out["uid"] = entry.identity.uid;
  out["start_time_ticks"] = entry.identity.start_ticks;
  out["pid_namespace"] = entry.identity.pid_namespace;
  nb::list workers;
  for (const ProcessStart& worker : entry.workers) {
    workers.append(nb::make_tuple(worker.pid, worker.start_ticks));
  }
  out["workers"] = workers;
  out["incarnation"] = entry.incarnation;
  out["status"] = liveness_name(entry.alive);
  out["granted_bytes"] = entry.facts.granted_bytes;
  out["min_bytes"] = entry.own_min_bytes;
  out["guaranteed_bytes"] = entry.facts.min_bytes;
  out["reserve_bytes"] = entry.own_reserve_bytes;
  out["pledged_bytes"] = entry.pledged_bytes;
  out["reserved_bytes"] = entry.reserved_bytes;
  out["asleep"] = entry.asleep;
  out["limit_bytes"] = entry.limit_bytes;
  out["priority"] = entry.facts.priority;
  out["in_use_bytes"] = entry.in_use_bytes;
  out["evictable_bytes"] = entry.facts.cached_bytes;
  out["parked_bytes"] = entry.facts.parked_bytes;
  out["page_bytes"] = entry.page_bytes;
  out["idle_s"] = seconds(entry.facts.idle_ns);
  out["is_idle"] = entry.facts.reported == Reported::kNothing
                       ? nb::object(nb::none())
                       : nb::object(nb::bool_(entry.facts.reported == Reported::kIdle));
  out["ask_bytes"] = entry.facts.request_bytes;
  out["ask_s"] = entry.facts.request_bytes > 0 ? seconds(entry.facts.request_ns) : 0.0;
  out["wanted_bytes"] = entry.facts.reclaim_bytes;
  return out;
}

Fields read_ledger(nb::handle buffer, int fd) {
  const auto hold = take_buffer(buffer, false);
  const LedgerView view = unwrap(LedgerView::open(hold->bytes()));
  const LivenessCheck liveness(fd);
  nb::list members;
  for (const LedgerEntry& entry : view.members(liveness)) members.append(entry_dict(entry));
  nb::dict out;
  out["device"] = text(view.header().device);
  out["group"] = text(view.header().group);
  out["uid"] = view.header().owner_uid;
  out["boot_id"] = nb::bytes(view.header().boot_id.data(), view.header().boot_id.size());
  out["capacity_bytes"] = view.capacity_bytes();
  out["total_bytes"] = view.total_bytes();
  out["others_bytes"] = view.others_bytes();
  out["members"] = members;
  return out;
}

template <auto kMethod>
struct InOwner;
template <typename Return, typename... Arguments, Return (LedgerMember::*kMethod)(Arguments...)>
struct InOwner<kMethod> {
  static Return call(LedgerMember& member, Arguments... arguments) {
    check(member.refuse_in_a_child());
    return (member.*kMethod)(arguments...);
  }
};
/// Wraps a method, so that it raises DeviceUnavailableError in a forked child.
template <auto kMethod>
constexpr auto in_owner_call = &InOwner<kMethod>::call;

}  // namespace

void bind_ledger(nb::module_& m) {
  m.attr("LEDGER_BYTES") = kLedgerBytes;
  m.attr("LEDGER_SLOTS") = kLedgerSlots;
  m.attr("LEDGER_ABI_VERSION") = kLedgerAbiVersion;
  m.attr("GRANT_UNIT_BYTES") = kGrantUnitBytes;

  m.def(
      "ledger_version",
      [](nb::bytes head) {
        const auto* at = reinterpret_cast<const std::byte*>(head.c_str());
        return ledger_version(std::span(at, head.size()));
      },
      "head"_a,
      "Return the ABI version if the bytes start like a ledger of any version, otherwise None.");
  m.def(
      "ledger_create",
      [](nb::handle buffer, const std::string& device, const std::string& group,
         std::uint64_t capacity_bytes, std::uint32_t uid, nb::bytes boot_id,
         std::uint64_t created_realtime_ns, std::uint64_t total_bytes) {
        const auto hold = take_buffer(buffer, true);
        check(ledger_create(hold->bytes(), {uid, sixteen(boot_id, "boot_id"), created_realtime_ns,
                                            capacity_bytes, total_bytes, device, group}));
      },
      "buffer"_a, nb::kw_only(), "device"_a, "group"_a, "capacity_bytes"_a, "uid"_a, "boot_id"_a,
      "created_realtime_ns"_a, "total_bytes"_a = 0,
      "Initialise a buffer as a ledger. Other processes must not see the buffer yet.");
  m.def("read_ledger", &read_ledger, "buffer"_a, "fd"_a = -1,
        "Return a ledger's contents as a dict. The buffer may be read-only. `fd` is a separate "
        "open file descriptor of the same file, to query whether members are alive; with -1 their "
        "liveness is unknown. Raises SegmentFormatError.");
  m.def(
      "ledger_check_integrity",
      [](nb::handle buffer) {
        const auto hold = take_buffer(buffer, false);
        check(unwrap(LedgerView::open(hold->bytes())).check_integrity());
      },
      "buffer"_a,
      "Raise IntegrityError if grants, guarantees and reserves exceed the device's memory. Passes "
      "if members change during the check. Any process may call it at any time.");
  m.def(
      "ledger_reap",
      [](nb::handle buffer, int fd) {
        const auto hold = take_buffer(buffer, true);
        return unwrap(ledger_reap(hold->bytes(), LivenessCheck(fd)));
      },
      "buffer"_a, "fd"_a,
      "Free the slots of dead members and return their number. `fd` is a separate open file "
      "descriptor of the same file.");
  m.def(
      "ledger_shut",
      [](nb::handle buffer) {
        const auto hold = take_buffer(buffer, true);
        return unwrap(ledger_shut(hold->bytes()));
      },
      "buffer"_a,
      "Close the ledger to new members if it has none. Returns True if it is closed. Dead members "
      "count until ledger_reap() removes them.");
  m.def(
      "ledger_decide_page_bytes",
      [](nb::handle buffer, std::uint64_t page_bytes) {
        const auto hold = take_buffer(buffer, true);
        return unwrap(ledger_decide_page_bytes(hold->bytes(), page_bytes));
      },
      "buffer"_a, "page_bytes"_a,
      "Set the device's default page size unless it is already set. Returns the size in effect, in "
      "bytes.");
  m.def("ledger_liveness_byte", &ledger_liveness_byte, "slot"_a, "incarnation"_a, "process"_a,
        "Return the number of the byte that a member's process locks. `process` is 0 for the "
        "scheduler and 1 + rank for a worker.");
  m.def(
      "ledger_set_capacity",
      [](nb::handle buffer, std::uint64_t capacity_bytes, int fd) {
        const auto hold = take_buffer(buffer, true);
        return unwrap(ledger_set_capacity(hold->bytes(), capacity_bytes, LivenessCheck(fd)));
      },
      "buffer"_a, "capacity_bytes"_a, "fd"_a,
      "Set the capacity and return the old one. Hold flock() on the file; `fd` is an open file "
      "descriptor of it. Raises GuaranteeError if the members' guarantees and reserves exceed the "
      "new capacity.");

  nb::class_<LedgerMember>(m, "LedgerMember", "An instance's membership in a ledger. Any thread.")
      .def_static(
          "join",
          [](nb::handle buffer, const std::string& name, nb::bytes uuid, std::uint32_t pid,
             std::uint64_t start_time_ticks, std::uint64_t pid_namespace, std::uint32_t uid,
             std::uint64_t min_bytes, std::uint64_t reserve_bytes, std::int64_t priority,
             const std::string& path, int fd, bool children_keep) {
            const auto hold = take_buffer(buffer, true);
            LedgerJoin how{.identity = {pid, uid, start_time_ticks, pid_namespace,
                                        sixteen(uuid, "uuid"), padded<64>(name)},
                           .min_bytes = min_bytes,
                           .reserve_bytes = reserve_bytes,
                           .priority = priority};
            if (children_keep) how.children = LivenessLock::Children::kKeep;
            if (fd >= 0) how.file = unwrap(LivenessFile::of(path, fd));
            // With a reserve this blocks until others have released memory.
            auto joined = without_gil(
                [&] { return LedgerMember::join(hold->bytes(), std::move(how), hold); });
            const std::shared_ptr<LedgerMember> member = unwrap(std::move(joined));
            return member ? std::optional(member) : std::nullopt;
          },
          "buffer"_a, nb::kw_only(), "name"_a, "uuid"_a, "pid"_a, "start_time_ticks"_a,
          "pid_namespace"_a, "uid"_a, "min_bytes"_a = 0, "reserve_bytes"_a = 0, "priority"_a = 0,
          "path"_a = "", "fd"_a = -1, "children_keep"_a = false,
          "Take a slot. Returns None if the ledger's file is or will be removed. `path` and `fd` "
          "identify the file in which this member's liveness lock is held; without them its "
          "liveness is unknown. With `children_keep`, the member counts as alive while a forked "
          "child is alive. With a reserve it blocks until others have released the memory. Raises "
          "GuaranteeError, ReserveError, PoolExhaustedError or SegmentError.")
      .def("leave", in_owner_call<&LedgerMember::leave>,
           "Return the whole grant and free the slot. Idempotent.")
      .def("linger", in_owner_call<&LedgerMember::linger>,
           "Keep the slot and the grant until the processes of this member have ended.")
      .def("grant", in_owner_call<&LedgerMember::grant>, "pages"_a, "page_bytes"_a,
           "Take up to `pages` pages, as many as are available, and return their number.")
      .def("arrived", in_owner_call<&LedgerMember::arrived>, "pages"_a, "page_bytes"_a,
           "Report that granted pages are on the device.")
      .def("leaving", in_owner_call<&LedgerMember::leaving>, "pages"_a, "page_bytes"_a,
           "Report that pages are about to leave the device. Call it before the driver gets their "
           "memory.")
      .def("give_back", in_owner_call<&LedgerMember::give_back>, "pages"_a, "page_bytes"_a)
      .def("room", &LedgerMember::room, "page_bytes"_a,
           "Return how many pages grant() could take now.")
      .def("reach", &LedgerMember::reach, "page_bytes"_a,
           "Return how many pages could become available: room() plus what other members would "
           "have to release.")
      .def("request_memory", in_owner_call<&LedgerMember::request_memory>, "bytes"_a,
           "Request `bytes` of memory from other members. Returns False if no member has to "
           "release any.")
      .def("end_memory_request", in_owner_call<&LedgerMember::end_memory_request>)
      .def_prop_ro("bell", &LedgerMember::bell)
      .def(
          "wait",
          [](const LedgerMember& member, std::uint32_t seen, double timeout_s) {
            const std::chrono::duration<double> timeout(timeout_s);
            const GilReleased unlocked;
            member.wait(seen, std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
          },
          "seen"_a, "timeout_s"_a,
          "Block until `bell` differs from `seen`, at most `timeout_s` seconds. The bell rings "
          "when memory becomes available or is requested from this member.")
      .def(
          "set_min",
          [](LedgerMember& member, std::uint64_t bytes) { check(member.set_min(bytes)); },
          "bytes"_a)
      .def(
          "reserve",
          [](LedgerMember& member, std::uint64_t bytes) {
            check(member.claim_reserve(bytes));
            const std::chrono::nanoseconds timeout(member.rules().reserve_wait_ns);
            check(without_gil([&] { return member.wait_for_claim(timeout); }));
          },
          "bytes"_a,
          "Set the reserve: the member's memory on the device besides its grants. For an increase, "
          "request memory from others and block until it is available, at most five seconds. "
          "Raises GuaranteeError or ReserveError; then nothing has changed.")
      .def(
          "wake",
          [](LedgerMember& member, double timeout_s) {
            check(member.claim_wake());
            const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
                std::chrono::duration<double>(timeout_s));
            check(without_gil([&] { return member.wait_for_claim(timeout); }));
          },
          "timeout_s"_a,
          "Claim the guarantee and the reserve again, as Pool.wake does; for tests. Blocks.")
      .def("fall_asleep", in_owner_call<&LedgerMember::fall_asleep>,
           "Exclude guarantee and reserve from the sums until the member wakes.")
      .def_prop_ro("is_asleep", &LedgerMember::is_asleep)
      .def_prop_ro("reserve_bytes", &LedgerMember::reserve_bytes)
      .def(
          "set_priority",
          [](LedgerMember& member, std::int64_t priority) { check(member.set_priority(priority)); },
          "priority"_a)
      .def(
          "add_worker",
          [](LedgerMember& member, std::uint32_t pid, std::uint64_t start_time_ticks) {
            check(member.add_worker(pid, start_time_ticks));
          },
          "pid"_a, "start_time_ticks"_a,
          "Register another process that maps the pages. The grants stay until all registered "
          "processes have ended.")
      .def("set_others", in_owner_call<&LedgerMember::set_others>, "bytes"_a)
      .def("publish", in_owner_call<&LedgerMember::publish>, "in_use_bytes"_a, "evictable_bytes"_a,
           "parked_bytes"_a, "page_bytes"_a, "active"_a)
      .def(
          "open_reclaim",
          [](const LedgerMember& member) {
            const LedgerMember::OpenReclaim open = member.open_reclaim();
            return std::pair(open.bytes, static_cast<std::uint32_t>(open.depth));
          },
          "Return (bytes, depth) that other members request from this one.")
      .def("handled", in_owner_call<&LedgerMember::handled>, "bytes"_a)
      .def_prop_ro("granted_bytes", &LedgerMember::granted_bytes)
      .def_prop_ro("capacity_bytes", &LedgerMember::capacity_bytes)
      .def_prop_ro("min_bytes", &LedgerMember::min_bytes)
      .def_prop_ro("priority", &LedgerMember::priority)
      .def(
          "measure_grant_ns",
          [](LedgerMember& member, std::uint64_t page_bytes, std::uint64_t count) {
            const std::uint64_t start = monotonic_ns();
            for (std::uint64_t i = 0; i < count; ++i) {
              member.give_back(member.grant(1, page_bytes), page_bytes);
            }
            return static_cast<double>(monotonic_ns() - start) / static_cast<double>(count);
          },
          "page_bytes"_a, "count"_a,
          "Return the mean time of a grant and its return in nanoseconds, measured natively.");
}

}  // namespace kvelastic
