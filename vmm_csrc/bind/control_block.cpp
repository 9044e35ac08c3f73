// `kvelastic._vmm.ControlBlock`: the control block of control_block.h in any Python buffer.
#include "bind/control_block.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <string>

#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/signatures.h"
#include "segment/control_block_copy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

/// Long waits check this often for signals, because another thread may have received them.
constexpr std::int64_t kSignalCheckNs = 100'000'000;

[[noreturn]] void raise_released() {
  raise_code("SEGMENT", "this control block has been released");
}

/// Converts seconds to nanoseconds. None, or more than 1e9 s: -1, without a limit.
std::int64_t nanoseconds(std::optional<double> seconds) {
  constexpr double most_seconds = 1e9;
  if (!seconds || *seconds > most_seconds) return -1;
  if (std::isnan(*seconds)) raise_code("INVALID_ARGUMENT", "a timeout cannot be nan");
  return static_cast<std::int64_t>(std::max(*seconds, 0.0) * 1e9);
}

/// Calls `wait(slice_ns)` without the GIL until it returns true or the time is over. Runs Python's
/// signal handlers in between; an exception from one ends the wait.
template <typename Wait>
bool wait_in_slices(std::int64_t timeout_ns, Wait wait) {
  const std::uint64_t start_ns = monotonic_ns();
  for (;;) {
    const auto passed_ns = static_cast<std::int64_t>(monotonic_ns() - start_ns);
    const std::int64_t left_ns = timeout_ns < 0 ? kSignalCheckNs : timeout_ns - passed_ns;
    const std::int64_t slice_ns = std::clamp<std::int64_t>(left_ns, 0, kSignalCheckNs);
    bool done = false;
    {
      const GilReleased unlocked;
      done = wait(slice_ns);
    }
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (left_ns <= slice_ns && timeout_ns >= 0 &&
        static_cast<std::int64_t>(monotonic_ns() - start_ns) >= timeout_ns) {
      return false;
    }
  }
}

PyControlBlock make_owner(nb::handle buffer, const std::string& name, const std::string& engine,
                          const std::string& model,
                          std::vector<std::pair<std::string, std::uint64_t>> devices,
                          nb::bytes uuid, std::uint32_t pid, std::uint64_t start_time_ticks,
                          nb::bytes boot_id, std::uint64_t pid_namespace, std::uint32_t uid,
                          std::uint64_t created_realtime_ns) {
  ControlBlockIdentity identity;
  identity.name = name;
  identity.engine = engine;
  identity.model = model;
  identity.devices = std::move(devices);
  identity.uuid = sixteen(uuid, "uuid");
  identity.owner_pid = pid;
  identity.owner_start_ticks = start_time_ticks;
  identity.boot_id = sixteen(boot_id, "boot_id");
  identity.pid_namespace = pid_namespace;
  identity.owner_uid = uid;
  identity.created_realtime_ns = created_realtime_ns;
  auto hold = take_buffer(buffer, true);
  auto owner = unwrap(ControlBlockOwner::create(hold->bytes(), identity));
  const ControlBlockView view = unwrap(ControlBlockView::open(hold->bytes()));
  return PyControlBlock(std::move(hold), view, std::move(owner));
}

PyControlBlock make_view(nb::handle buffer) {
  auto hold = take_buffer(buffer, false);
  const ControlBlockView view = unwrap(ControlBlockView::open(hold->bytes()));
  return PyControlBlock(std::move(hold), view, nullptr);
}

const char* state_name(std::optional<InstanceState> state) {
  if (!state) return "unknown";
  return *state == InstanceState::kAlive ? "alive" : "closing";
}

constexpr std::array<std::pair<AckState, const char*>, 5> kAckStates{{
    {AckState::kNone, "none"},
    {AckState::kApplied, "applied"},
    {AckState::kShrinking, "shrinking"},
    {AckState::kRefused, "refused"},
    {AckState::kFailed, "failed"},
}};

const char* ack_state_name(AckState state) {
  for (const auto& [value, name] : kAckStates) {
    if (value == state) return name;
  }
  return "unknown";
}

AckState ack_state_of(const std::string& name) {
  for (const auto& [value, known] : kAckStates) {
    if (name == known) return value;
  }
  raise_code("INVALID_ARGUMENT", "unknown acknowledgement state '" + name +
                                     "'; known: none, applied, shrinking, refused");
}

/// The fields of Usage that Python sees, by name.
constexpr std::array<std::pair<const char*, std::uint64_t Usage::*>, 22> kUsageFields{{
    {"capacity_bytes", &Usage::capacity_bytes},
    {"mapped_bytes", &Usage::mapped_bytes},
    {"in_use_bytes", &Usage::in_use_bytes},
    {"cached_bytes", &Usage::cached_bytes},
    {"parked_bytes", &Usage::parked_bytes},
    {"page_bytes", &Usage::page_bytes},
    {"blocks_total", &Usage::blocks_total},
    {"blocks_in_use", &Usage::blocks_in_use},
    {"blocks_cached", &Usage::blocks_cached},
    {"blocks_available", &Usage::blocks_available},
    {"blocks_reserved", &Usage::blocks_reserved},
    {"pages_mapped", &Usage::pages_mapped},
    {"pages_parked", &Usage::pages_parked},
    {"updated_ns", &Usage::updated_ns},
    {"asleep", &Usage::asleep},
    {"limit_bytes", &Usage::limit_bytes},
    {"under_pressure", &Usage::under_pressure},
    {"mappings_per_page", &Usage::mappings_per_page},
    {"reports_waiting", &Usage::reports_waiting},
    {"requests_waiting", &Usage::requests_waiting},
    {"first_needs_bytes", &Usage::first_needs_bytes},
    {"first_may_need_bytes", &Usage::first_may_need_bytes},
}};

nb::list devices_of(const ControlBlockHeader& header) {
  nb::list out;
  for (const ControlBlockDevice& device : header.devices) {
    if (device.copies == 0) break;
    out.append(nb::make_tuple(text(device.name), device.copies));
  }
  return out;
}

Fields read_header(const PyControlBlock& control_block) {
  const ControlBlockHeader& header = control_block.view().header();
  nb::dict out;
  out["abi_version"] = header.abi_version;
  out["total_bytes"] = header.total_bytes;
  out["ring_offset"] = header.ring_offset;
  out["ring_bytes"] = header.ring_bytes;
  out["name"] = text(header.name);
  out["engine"] = text(header.engine);
  out["model"] = text(header.model);
  out["device"] = text(header.devices.front().name);
  out["devices"] = devices_of(header);
  out["uuid"] = nb::bytes(header.uuid.data(), header.uuid.size());
  out["pid"] = header.owner_pid;
  out["start_time_ticks"] = header.owner_start_ticks;
  out["boot_id"] = nb::bytes(header.boot_id.data(), header.boot_id.size());
  out["pid_namespace"] = header.pid_namespace;
  out["uid"] = header.owner_uid;
  out["created_realtime_ns"] = header.created_realtime_ns;
  out["state"] = state_name(control_block.view().state());
  return out;
}

Fields request_dict(const Request& request) {
  nb::dict out;
  out["revision"] = request.revision;
  const auto said = [](std::uint64_t revision, auto value) -> nb::object {
    return revision != 0 ? nb::object(nb::int_(value)) : nb::none();
  };
  out["limit_bytes"] = said(request.limit_revision, request.limit_bytes);
  out["limit_revision"] = request.limit_revision;
  out["min_bytes"] = said(request.min_revision, request.min_bytes);
  out["priority"] = said(request.priority_revision, request.priority);
  out["asleep"] = said(request.asleep_revision, request.asleep);
  out["trim_revision"] = request.trim_revision;
  out["writer_pid"] = request.writer_pid;
  out["written_ns"] = request.written_ns;
  return out;
}

Fields read_request(const PyControlBlock& control_block) {
  Request request;
  const bool whole = control_block.view().read_request(request);
  Fields out = request_dict(request);
  out["whole"] = whole;
  return out;
}

Fields read_ack(const PyControlBlock& control_block) {
  Ack ack;
  const bool whole = control_block.view().read_ack(ack);
  nb::dict out;
  out["revision"] = ack.revision;
  out["effective_limit_bytes"] = ack.effective_limit_bytes;
  out["mapped_bytes"] = ack.mapped_bytes;
  out["over_bytes"] = ack.over_bytes;
  out["min_bytes"] = ack.min_bytes;
  out["priority"] = ack.priority;
  out["state"] = ack_state_name(ack.state);
  const std::string reason = control_block.view().reason_of(ack);
  out["reason"] = text(reason);
  out["acknowledged_ns"] = ack.acknowledged_ns;
  out["whole"] = whole;
  return out;
}

Fields read_usage(const PyControlBlock& control_block) {
  Usage usage;
  const bool whole = control_block.view().read_usage(usage);
  nb::dict out;
  for (const auto& [name, field] : kUsageFields) out[name] = usage.*field;
  out["whole"] = whole;
  return out;
}

std::optional<bool> engine_asleep(const PyControlBlock& control_block) {
  const EngineSleep sleep = control_block.view().engine_sleep();
  if (sleep == EngineSleep::kUnknown) return std::nullopt;
  return sleep == EngineSleep::kAsleep;
}

Counts counters(const PyControlBlock& control_block) {
  nb::dict out;
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(Counter::kCount); ++i) {
    const auto counter = static_cast<Counter>(i);
    const std::string_view name = counter_name(counter);
    out[nb::str(name.data(), name.size())] = control_block.view().counter(counter);
  }
  return out;
}

void publish_usage(const PyControlBlock& control_block, nb::kwargs fields) {
  Usage usage;
  for (auto [key, value] : fields) {
    const auto name = nb::cast<std::string>(key);
    const auto* known = std::find_if(kUsageFields.begin(), kUsageFields.end(),
                                     [&](const auto& entry) { return name == entry.first; });
    if (known == kUsageFields.end()) {
      raise_code("INVALID_ARGUMENT", "usage has no field '" + name + "'");
    }
    usage.*(known->second) = nb::cast<std::uint64_t>(value);
  }
  control_block.native()->publish_usage(usage);
}

double measure_publish_ns(const PyControlBlock& control_block, std::uint64_t count) {
  const std::shared_ptr<ControlBlockOwner> owner = control_block.native();
  Usage usage;
  (void)control_block.view().read_usage(usage);
  const GilReleased unlocked;
  const std::uint64_t start_ns = monotonic_ns();
  for (std::uint64_t i = 0; i < count; ++i) owner->publish_usage(usage);
  const auto passed_ns = static_cast<double>(monotonic_ns() - start_ns);
  return count == 0 ? 0.0 : passed_ns / static_cast<double>(count);
}

void publish_ack(const PyControlBlock& control_block, std::uint64_t revision,
                 const std::string& state, std::uint64_t effective_limit_bytes,
                 std::uint64_t mapped_bytes, std::uint64_t over_bytes, const std::string& reason,
                 std::uint64_t min_bytes, std::int64_t priority) {
  Ack ack;
  ack.revision = revision;
  ack.state = ack_state_of(state);
  ack.effective_limit_bytes = effective_limit_bytes;
  ack.mapped_bytes = mapped_bytes;
  ack.over_bytes = over_bytes;
  ack.min_bytes = min_bytes;
  ack.priority = priority;
  control_block.native()->acknowledge(ack, reason);
}

std::optional<Fields> owner_request(const PyControlBlock& control_block) {
  const auto request = control_block.native()->read_request();
  if (!request) return std::nullopt;
  return request_dict(*request);
}

void add_counter(const PyControlBlock& control_block, const std::string& name,
                 std::uint64_t amount) {
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(Counter::kCount); ++i) {
    const auto counter = static_cast<Counter>(i);
    if (counter_name(counter) == name) return control_block.native()->add(counter, amount);
  }
  raise_code("INVALID_ARGUMENT", "no counter is called '" + name + "'");
}

RequestChange make_change(std::optional<std::uint64_t> limit_bytes,
                          std::optional<std::uint64_t> min_bytes,
                          std::optional<std::int64_t> priority, std::optional<bool> asleep,
                          bool trim) {
  if (priority) check(check_priority(*priority));
  RequestChange change;
  change.limit_bytes = limit_bytes;
  change.min_bytes = min_bytes;
  change.priority = priority;
  change.asleep = asleep;
  change.trim = trim;
  return change;
}

bool wait_ack(const PyControlBlock& control_block, std::uint64_t revision,
              std::optional<double> timeout_s, bool settled) {
  const auto hold = control_block.hold();  // keeps it mapped if another thread calls release()
  const ControlBlockView view = control_block.view();
  return wait_in_slices(nanoseconds(timeout_s), [&](std::int64_t slice_ns) {
    return view.wait_ack(revision, settled, slice_ns);
  });
}

bool wait_bell(const PyControlBlock& control_block, std::uint32_t seen,
               std::optional<double> timeout_s) {
  const auto owner = control_block.native();
  return wait_in_slices(nanoseconds(timeout_s),
                        [&](std::int64_t slice_ns) { return owner->wait_bell(seen, slice_ns); });
}

std::optional<std::uint32_t> version_of(nb::handle buffer) {
  const auto hold = take_buffer(buffer, false);
  return control_block_version(hold->bytes());
}

void copy_control_block_to(int fd, nb::handle buffer) {
  const auto hold = take_buffer(buffer, true);
  int problem = 0;
  {
    const GilReleased unlocked;
    problem = copy_control_block(fd, hold->bytes());
  }
  if (problem == 0) return;
  errno = problem;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

}  // namespace

std::shared_ptr<BufferHold> take_buffer(nb::handle buffer, bool must_write) {
  Py_buffer raw{};
  if (PyObject_GetBuffer(buffer.ptr(), &raw, PyBUF_WRITABLE) != 0) {
    if (must_write || !PyErr_ExceptionMatches(PyExc_BufferError)) throw nb::python_error();
    PyErr_Clear();
    if (PyObject_GetBuffer(buffer.ptr(), &raw, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  return std::make_shared<BufferHold>(raw);
}

nb::str text(std::span<const char> field) {
  const std::string_view view = text_of(field);
  PyObject* decoded =
      PyUnicode_DecodeUTF8(view.data(), static_cast<Py_ssize_t>(view.size()), "replace");
  if (decoded == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(decoded);
}

std::array<std::uint8_t, 16> sixteen(const nb::bytes& value, const char* what) {
  std::array<std::uint8_t, 16> out{};
  if (value.size() != out.size()) {
    raise_code("INVALID_ARGUMENT",
               std::string(what) + " must have 16 bytes, not " + std::to_string(value.size()));
  }
  std::memcpy(out.data(), value.c_str(), out.size());
  return out;
}

BufferHold::~BufferHold() {
  if (Py_IsInitialized() == 0) return;  // the finalized interpreter has released its buffers
  const GilHeld locked;
  PyBuffer_Release(&buffer_);
}

std::shared_ptr<ControlBlockOwner> PyControlBlock::native() const {
  if (is_released()) raise_released();
  if (!owner_) raise_code("SEGMENT", "only the process that made this segment may do that");
  // The returned pointer also keeps the buffer that the owner writes to.
  struct Both {
    std::shared_ptr<BufferHold> hold;
    std::shared_ptr<ControlBlockOwner> owner;
  };
  auto both = std::make_shared<Both>(Both{hold_, owner_});
  ControlBlockOwner* owner = both->owner.get();
  return {std::move(both), owner};
}

std::shared_ptr<BufferHold> PyControlBlock::hold() const {
  if (is_released()) raise_released();
  return hold_;
}

const ControlBlockView& PyControlBlock::view() const {
  if (is_released()) raise_released();
  return view_;
}

RequestWriter PyControlBlock::writer() const {
  if (is_released()) raise_released();
  if (hold_->readonly()) raise_code("SEGMENT", "this segment was opened for reading only");
  return unwrap(RequestWriter::open(hold_->bytes()));
}

void bind_control_block(nb::module_& m) {
  m.attr("CONTROL_BLOCK_MAGIC") = nb::bytes(reinterpret_cast<const char*>(&kControlBlockMagic), 8);
  m.attr("CONTROL_BLOCK_ABI_VERSION") = kControlBlockAbiVersion;
  m.attr("MAX_PRIORITY") = kMaxPriority;
  m.attr("CONTROL_BLOCK_BYTES") = kControlBlockBytes;
  m.attr("RING_AREA_BYTES") = kRingAreaBytes;
  m.attr("SEGMENT_BYTES") = kSegmentBytes;
  m.attr("CONTROL_BLOCK_HEADER_BYTES") = sizeof(ControlBlockHeader);
  m.attr("CONTROL_BLOCK_DEVICES") = kControlBlockDevices;
  m.attr("UNLIMITED_BYTES") = kUnlimitedBytes;
  m.def("control_block_version", &version_of, "buffer"_a,
        "Return the ABI version if the bytes start like a segment of any version, otherwise None.");
  m.def("copy_control_block", &copy_control_block_to, "fd"_a, "buffer"_a,
        "Copy the control block of an open file into a buffer, without mapping the file. Each "
        "value is consistent even if its writer changes it during the copy. Bytes beyond the end "
        "of the file stay unchanged in the buffer. Raises OSError.");

  nb::class_<PyControlBlock>(
      m, "ControlBlock",
      "The control block at the start of a segment, in a buffer such as an mmap. "
      "ControlBlock(buffer) reads it, and also writes requests if the buffer is "
      "writable. ControlBlock.create(...) makes the owner's end. Any thread. Raises "
      "SegmentFormatError if the bytes are not a segment of this version.")
      .def_static("create", &make_owner, "buffer"_a, nb::kw_only(), "name"_a, "engine"_a, "model"_a,
                  "devices"_a, "uuid"_a, "pid"_a, "start_time_ticks"_a, "boot_id"_a,
                  "pid_namespace"_a, "uid"_a, "created_realtime_ns"_a,
                  "Clear the buffer (SEGMENT_BYTES) and write the owner's identity. Other "
                  "processes must not see the buffer yet.")
      .def_static("open", &make_view, "buffer"_a,
                  "Open the control block in a buffer, which may be read-only.")
      .def_prop_ro("is_owner", &PyControlBlock::is_owner)
      .def_prop_ro("readonly", [](const PyControlBlock& r) { return r.hold()->readonly(); })
      .def_prop_ro("state", [](const PyControlBlock& r) { return state_name(r.view().state()); })
      .def("release", &PyControlBlock::release,
           "Release the buffer. A pool or maintenance thread that uses it still keeps it.")
      .def("read_header", &read_header)
      .def("read_request", &read_request)
      .def("read_ack", &read_ack)
      .def("read_usage", &read_usage)
      .def("counters", &counters)
      .def_prop_ro("engine_asleep", &engine_asleep,
                   "True if the engine itself sleeps; None if it has not reported that.")
      .def(
          "set_engine_asleep",
          [](const PyControlBlock& r, bool asleep) {
            r.native()->set_engine_sleep(asleep ? EngineSleep::kAsleep : EngineSleep::kAwake);
          },
          "asleep"_a, "For the owner: report whether the engine itself sleeps.")
      .def(
          "write_request",
          [](const PyControlBlock& r, std::optional<std::uint64_t> limit_bytes,
             std::optional<std::uint64_t> min_bytes, std::optional<std::int64_t> priority,
             std::optional<bool> asleep, bool trim) {
            return r.writer().write(make_change(limit_bytes, min_bytes, priority, asleep, trim));
          },
          "limit_bytes"_a = nb::none(), nb::kw_only(), "min_bytes"_a = nb::none(),
          "priority"_a = nb::none(), "asleep"_a = nb::none(), "trim"_a = false,
          "Publish a request, wake the owner and return the revision. Hold flock() on the file.")
      .def(
          "write_half_request",
          [](const PyControlBlock& r, std::uint64_t limit_bytes) {
            r.writer().write_half(make_change(limit_bytes, {}, {}, {}, false));
          },
          "limit_bytes"_a, "For tests: write what a writer that dies halfway leaves behind.")
      .def("wait_ack", &wait_ack, "revision"_a, "timeout_s"_a, nb::kw_only(), "settled"_a = false,
           "Block until the owner has acknowledged this request or a later one; with `settled`, "
           "until the state is also no longer shrinking. Returns False after `timeout_s` seconds "
           "(None: never). Releases the GIL; Python signal handlers still run.")
      .def("ring_bell", [](const PyControlBlock& r) { r.writer().ring_bell(); })
      .def_prop_ro("bell", [](const PyControlBlock& r) { return r.native()->bell(); })
      .def("wait_bell", &wait_bell, "seen"_a, "timeout_s"_a,
           "For the owner: block until the bell differs from `seen` and return True, or return "
           "False after `timeout_s` seconds (None: never). Releases the GIL.")
      .def("owner_request", &owner_request, "For the owner: return the newest request, or None.")
      .def("publish_ack", &publish_ack, "revision"_a, "state"_a, nb::kw_only(),
           "effective_limit_bytes"_a, "mapped_bytes"_a = 0, "over_bytes"_a = 0, "reason"_a = "",
           "min_bytes"_a = 0, "priority"_a = 0,
           "For the owner: acknowledge a request and wake the processes that wait for that.")
      .def("publish_usage", &publish_usage,
           nb::sig("def publish_usage(self, **fields: int) -> None"),
           "For the owner: publish the usage. The keywords are the fields of read_usage().")
      .def("add_counter", &add_counter, "name"_a, "amount"_a = 1)
      .def(
          "set_closing",
          [](const PyControlBlock& r) { r.native()->set_state(InstanceState::kClosing); },
          "For the owner: report that it acknowledges no further request.")
      .def("measure_publish_ns", &measure_publish_ns, "count"_a,
           "For the owner, for benchmarks: return the mean time of `count` usage publications in "
           "nanoseconds.");
}

}  // namespace kvelastic
