// `kvelastic._vmm`: the ledger of a device.
#include "ledger/ledger.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/life.h"
#include "bind/record.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

std::shared_ptr<BufferHold> hold_buffer(nb::handle buffer, int flags) {
  Py_buffer raw{};
  if (PyObject_GetBuffer(buffer.ptr(), &raw, flags) != 0) throw nb::python_error();
  return std::make_shared<BufferHold>(raw);
}

template <std::size_t N>
std::array<char, N> padded(const std::string& text) {
  std::array<char, N> out{};
  std::memcpy(out.data(), text.data(), std::min(N, text.size()));
  return out;
}

template <std::size_t N>
nb::str text_field(const std::array<char, N>& field) {
  const std::string_view view = text_of(field);
  PyObject* decoded =
      PyUnicode_DecodeUTF8(view.data(), static_cast<Py_ssize_t>(view.size()), "replace");
  if (decoded == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(decoded);
}

std::array<std::uint8_t, 16> sixteen(nb::bytes value) {
  std::array<std::uint8_t, 16> out{};
  if (value.size() != out.size()) raise_code("INVALID_ARGUMENT", "an id must have 16 bytes");
  std::memcpy(out.data(), value.c_str(), out.size());
  return out;
}

constexpr double kNsPerSecond = 1e9;

double seconds(std::uint64_t ns) {
  return static_cast<double>(ns) / kNsPerSecond;
}

nb::dict entry_dict(const LedgerEntry& entry) {
  nb::dict out;
  out["slot"] = entry.slot;
  out["name"] = text_field(entry.identity.name);
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
  out["life"] = entry.life;
  out["status"] = life_name(entry.alive);
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
  out["ask_bytes"] = entry.facts.ask_bytes;
  out["ask_s"] = entry.facts.ask_bytes > 0 ? seconds(entry.facts.ask_ns) : 0.0;
  out["wanted_bytes"] = entry.facts.wanted_bytes;
  return out;
}

nb::dict read_ledger(nb::handle buffer, int fd) {
  const auto hold = hold_buffer(buffer, PyBUF_SIMPLE);
  const LedgerView view = unwrap(LedgerView::open(hold->bytes()));
  const LifeJudge judge(fd);
  nb::list members;
  for (const LedgerEntry& entry : view.members(judge)) members.append(entry_dict(entry));
  nb::dict out;
  out["device"] = text_field(view.header().device);
  out["group"] = text_field(view.header().group);
  out["uid"] = view.header().owner_uid;
  out["boot_id"] = nb::bytes(view.header().boot_id.data(), view.header().boot_id.size());
  out["capacity_bytes"] = view.capacity_bytes();
  out["total_bytes"] = view.total_bytes();
  out["others_bytes"] = view.others_bytes();
  out["members"] = members;
  return out;
}

template <auto kMethod>
struct Own;
template <typename Return, typename... Arguments, Return (LedgerMember::*kMethod)(Arguments...)>
struct Own<kMethod> {
  static Return call(LedgerMember& member, Arguments... arguments) {
    check(member.refuse_in_a_child());
    return (member.*kMethod)(arguments...);
  }
};
/// A method that raises DeviceUnavailableError in a forked child.
template <auto kMethod>
constexpr auto of_its_own = &Own<kMethod>::call;

}  // namespace

void bind_ledger(nb::module_& m) {
  m.attr("LEDGER_BYTES") = kLedgerBytes;
  m.attr("LEDGER_SLOTS") = kLedgerSlots;
  m.attr("LEDGER_ABI_VERSION") = kLedgerAbiVersion;
  m.attr("GRANT_UNIT_BYTES") = kGrantUnitBytes;

  m.def(
      "ledger_version",
      [](nb::bytes head) -> nb::object {
        const auto* at = reinterpret_cast<const std::byte*>(head.c_str());
        const auto version = ledger_version(std::span(at, head.size()));
        return version ? nb::object(nb::int_(*version)) : nb::none();
      },
      "head"_a, "The ABI version of bytes that start like a ledger; None if they do not.");
  m.def(
      "ledger_create",
      [](nb::handle buffer, const std::string& device, const std::string& group,
         std::uint64_t capacity_bytes, std::uint32_t uid, nb::bytes boot_id,
         std::uint64_t created_realtime_ns, std::uint64_t total_bytes) {
        const auto hold = hold_buffer(buffer, PyBUF_WRITABLE);
        check(ledger_create(hold->bytes(), {uid, sixteen(boot_id), created_realtime_ns,
                                            capacity_bytes, total_bytes, device, group}));
      },
      "buffer"_a, nb::kw_only(), "device"_a, "group"_a, "capacity_bytes"_a, "uid"_a, "boot_id"_a,
      "created_realtime_ns"_a, "total_bytes"_a = 0,
      "Make a buffer that nobody else sees yet a ledger.");
  m.def(
      "read_ledger", &read_ledger, "buffer"_a, "fd"_a = -1,
      "What a ledger says, as a dict; a read-only buffer will do. Raises SegmentFormatError.\n"
      "`fd` is an open of the same file, by which members' lives are asked; -1: all are unknown.");
  m.def(
      "ledger_check_integrity",
      [](nb::handle buffer) {
        const auto hold = hold_buffer(buffer, PyBUF_SIMPLE);
        check(unwrap(LedgerView::open(hold->bytes())).check_integrity());
      },
      "buffer"_a,
      "Add everything up; raises IntegrityError where grants, guarantees and reserves are more "
      "than\n"
      "the device has. Any process, at any time: of what changes meanwhile it says nothing.");
  m.def(
      "ledger_reap",
      [](nb::handle buffer, int fd) {
        const auto hold = hold_buffer(buffer, PyBUF_WRITABLE);
        return unwrap(ledger_reap(hold->bytes(), LifeJudge(fd)));
      },
      "buffer"_a, "fd"_a,
      "Free the slots of the dead; returns how many. `fd` is an open of the same file.");
  m.def(
      "ledger_shut",
      [](nb::handle buffer) {
        const auto hold = hold_buffer(buffer, PyBUF_WRITABLE);
        return unwrap(ledger_shut(hold->bytes()));
      },
      "buffer"_a, "Let nobody join any more if there is no member; True: so it is.");
  m.def(
      "ledger_decide_page_bytes",
      [](nb::handle buffer, std::uint64_t page_bytes) {
        const auto hold = hold_buffer(buffer, PyBUF_WRITABLE);
        return unwrap(ledger_decide_page_bytes(hold->bytes(), page_bytes));
      },
      "buffer"_a, "page_bytes"_a,
      "Decide the device's default page size, unless it is decided; returns what is decided.");
  m.def("ledger_life_byte", &ledger_life_byte, "slot"_a, "life"_a, "process"_a,
        "The byte of a member's process: 0 its scheduler, 1 + rank a worker.");
  m.def(
      "ledger_set_capacity",
      [](nb::handle buffer, std::uint64_t capacity_bytes, int fd) {
        const auto hold = hold_buffer(buffer, PyBUF_WRITABLE);
        return unwrap(ledger_set_capacity(hold->bytes(), capacity_bytes, LifeJudge(fd)));
      },
      "buffer"_a, "capacity_bytes"_a, "fd"_a,
      "Change the capacity; hold flock() on the file, of which `fd` is an open. Returns what it\n"
      "was. Raises GuaranteeError.");

  nb::class_<LedgerMember>(m, "LedgerMember", "An instance's end of a ledger; any thread.")
      .def_static(
          "join",
          [](nb::handle buffer, const std::string& name, nb::bytes uuid, std::uint32_t pid,
             std::uint64_t start_time_ticks, std::uint64_t pid_namespace, std::uint32_t uid,
             std::uint64_t min_bytes, std::uint64_t reserve_bytes, std::int64_t priority,
             const std::string& path, int fd, bool children_keep) {
            const auto hold = hold_buffer(buffer, PyBUF_WRITABLE);
            LedgerJoin how{.identity = {pid, uid, start_time_ticks, pid_namespace, sixteen(uuid),
                                        padded<64>(name)},
                           .min_bytes = min_bytes,
                           .reserve_bytes = reserve_bytes,
                           .priority = priority};
            if (children_keep) how.children = LifeLock::Children::kKeep;
            if (fd >= 0) how.file = unwrap(LifeFile::of(path, fd));
            // With a reserve it waits for what others have to give.
            auto joined = without_gil(
                [&] { return LedgerMember::join(hold->bytes(), std::move(how), hold); });
            return std::shared_ptr<LedgerMember>(unwrap(std::move(joined)));
          },
          "buffer"_a, nb::kw_only(), "name"_a, "uuid"_a, "pid"_a, "start_time_ticks"_a,
          "pid_namespace"_a, "uid"_a, "min_bytes"_a = 0, "reserve_bytes"_a = 0, "priority"_a = 0,
          "path"_a = "", "fd"_a = -1, "children_keep"_a = false,
          "Take a slot; None: the file is removed, or about to be. `path` and `fd` are the "
          "file's,\n"
          "in which this member's life is held; without them nobody can tell whether it lives.\n"
          "`children_keep`: it counts as alive as long as a forked child does. Raises\n"
          "GuaranteeError, ReserveError, PoolExhaustedError, SegmentError.")
      .def("leave", of_its_own<&LedgerMember::leave>,
           "Give everything back and the slot up. Repeatable.")
      .def("linger", of_its_own<&LedgerMember::linger>,
           "Keep the slot and what is granted until the processes of this member have ended.")
      .def("grant", of_its_own<&LedgerMember::grant>, "pages"_a, "page_bytes"_a,
           "Take as many of `pages` pages as there is room for; returns how many.")
      .def("arrived", of_its_own<&LedgerMember::arrived>, "pages"_a, "page_bytes"_a,
           "Pages that were granted are on the device.")
      .def("leaving", of_its_own<&LedgerMember::leaving>, "pages"_a, "page_bytes"_a,
           "Pages that are on the device will not be there any more.")
      .def("give_back", of_its_own<&LedgerMember::give_back>, "pages"_a, "page_bytes"_a)
      .def("room", &LedgerMember::room, "page_bytes"_a, "Pages that grant() would give now.")
      .def("reach", &LedgerMember::reach, "page_bytes"_a,
           "The same with what others would have to give up.")
      .def("ask", of_its_own<&LedgerMember::ask>, "bytes"_a,
           "Say that bytes are missing and ask others for them. False: nobody has to give.")
      .def("stop_asking", of_its_own<&LedgerMember::stop_asking>)
      .def_prop_ro("bell", &LedgerMember::bell)
      .def(
          "wait",
          [](const LedgerMember& member, std::uint32_t seen, double timeout_s) {
            const std::chrono::duration<double> timeout(timeout_s);
            const GilReleased unlocked;
            member.wait(seen, std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
          },
          "seen"_a, "timeout_s"_a,
          "Block until the bell is another than `seen`: memory came free, or is asked for.")
      .def("set_min",
           [](LedgerMember& member, std::uint64_t bytes) { check(member.set_min(bytes)); })
      .def(
          "reserve",
          [](LedgerMember& member, std::uint64_t bytes) {
            check(member.ask_to_reserve(bytes));
            const std::chrono::nanoseconds timeout(member.rules().reserve_wait_ns);
            check(without_gil([&] { return member.wait_for_claim(timeout); }));
          },
          "bytes"_a,
          "Say what this member has on the device beside its grants. For more than before others\n"
          "are asked, and waited for, five seconds at most. Raises GuaranteeError, ReserveError;\n"
          "nothing has changed then.")
      .def(
          "wake",
          [](LedgerMember& member, double timeout_s) {
            check(member.ask_to_wake());
            const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
                std::chrono::duration<double>(timeout_s));
            check(without_gil([&] { return member.wait_for_claim(timeout); }));
          },
          "timeout_s"_a, "Have guarantee and reserve count again, as Pool.wake; for tests.")
      .def("fall_asleep", of_its_own<&LedgerMember::fall_asleep>,
           "Guarantee and reserve count for nothing until it wakes.")
      .def_prop_ro("is_asleep", &LedgerMember::is_asleep)
      .def_prop_ro("reserve_bytes", &LedgerMember::reserve_bytes)
      .def("set_priority", [](LedgerMember& member,
                              std::int64_t priority) { check(member.set_priority(priority)); })
      .def(
          "add_worker",
          [](LedgerMember& member, std::uint32_t pid, std::uint64_t start_time_ticks) {
            check(member.add_worker(pid, start_time_ticks));
          },
          "pid"_a, "start_time_ticks"_a,
          "Name one more process that maps the pages: grants stay until all of them are gone.")
      .def("set_others", of_its_own<&LedgerMember::set_others>, "bytes"_a)
      .def("publish", of_its_own<&LedgerMember::publish>, "in_use_bytes"_a, "evictable_bytes"_a,
           "parked_bytes"_a, "page_bytes"_a, "active"_a)
      .def(
          "wanted",
          [](const LedgerMember& member) {
            const LedgerMember::Wanted wanted = member.wanted();
            return nb::make_tuple(wanted.bytes, static_cast<std::uint32_t>(wanted.depth));
          },
          "(bytes, depth) that others ask of this one.")
      .def("handled", of_its_own<&LedgerMember::handled>, "bytes"_a)
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
          "page_bytes"_a, "count"_a, "Nanoseconds of a grant and its return, timed natively.");
}

}  // namespace kvelastic
