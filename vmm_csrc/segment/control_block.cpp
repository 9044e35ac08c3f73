#include "segment/control_block.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/checksum.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kNsPerS = 1'000'000'000;

std::uint64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);  // cannot fail for the clocks used here
  return static_cast<std::uint64_t>(now.tv_sec) * kNsPerS + static_cast<std::uint64_t>(now.tv_nsec);
}

std::uint32_t header_crc(ControlBlockHeader header) {
  header.crc32 = 0;
  return crc32_of(std::as_bytes(std::span(&header, 1)));
}

/// The end of a wait on the monotonic clock.
class Deadline {
 public:
  /// A negative timeout never ends.
  explicit Deadline(std::int64_t timeout_ns)
      : never_(timeout_ns < 0), at_ns_(monotonic_ns() + static_cast<std::uint64_t>(timeout_ns)) {}

  /// Returns kForever or the remaining time, which is not positive after the end.
  std::chrono::nanoseconds left() const {
    if (never_) return kForever;
    return std::chrono::nanoseconds(static_cast<std::int64_t>(at_ns_ - monotonic_ns()));
  }
  bool over() const { return left() <= std::chrono::nanoseconds::zero(); }

 private:
  bool never_;
  std::uint64_t at_ns_;
};

template <std::size_t N>
Status copy_text(std::array<char, N>& field, std::string_view text, std::string_view what) {
  if (text.size() > N) {
    return Error{Errc::kInvalidArgument, std::string(what) + " has " + std::to_string(text.size()) +
                                             " bytes; the segment has room for " +
                                             std::to_string(N)};
  }
  if (text.find('\0') != std::string_view::npos) {
    return Error{Errc::kInvalidArgument, std::string(what) + " has a zero byte in it"};
  }
  field.fill('\0');
  if (!text.empty()) std::memcpy(field.data(), text.data(), text.size());
  return ok();
}

bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % alignof(ControlBlockLayout) == 0;
}

Error misaligned() {
  return {Errc::kInvalidArgument, "a segment's bytes must start at a multiple of " +
                                      std::to_string(alignof(ControlBlockLayout)) +
                                      "; map the file"};
}

Error malformed(std::string detail) {
  return {Errc::kSegmentFormat, "not a segment that this kvelastic can read: " + std::move(detail)};
}

Status validate(std::span<const std::byte> bytes) {
  const auto version = control_block_version(bytes);
  if (!version) return malformed("it does not start with the mark of a segment");
  if (*version != kControlBlockAbiVersion) {
    return malformed("it has version " + std::to_string(*version) + ", this build reads version " +
                     std::to_string(kControlBlockAbiVersion));
  }
  if (bytes.size() < kControlBlockBytes) {
    return malformed("it has " + std::to_string(bytes.size()) + " bytes, a control block has " +
                     std::to_string(kControlBlockBytes));
  }
  ControlBlockHeader header{};
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.header_bytes != sizeof(ControlBlockHeader) || header_crc(header) != header.crc32) {
    return malformed("its header does not match its checksum");
  }
  // The checks below are for a correct checksum over wrong numbers, which only another program
  // writes.
  if (header.total_bytes > bytes.size()) {
    return malformed("it has " + std::to_string(bytes.size()) + " bytes of the " +
                     std::to_string(header.total_bytes) + " that its header says");
  }
  if (header.ring_offset < kControlBlockBytes || header.ring_offset > header.total_bytes ||
      header.ring_bytes > header.total_bytes - header.ring_offset) {
    return malformed("its ring area lies outside it");
  }
  return ok();
}

}  // namespace

std::uint64_t monotonic_ns() {
  return clock_ns(CLOCK_MONOTONIC);
}
std::uint64_t monotonic_coarse_ns() {
  return clock_ns(CLOCK_MONOTONIC_COARSE);
}

std::string_view counter_name(Counter counter) {
  switch (counter) {
    case Counter::kPagesMapped:
      return "pages_mapped";
    case Counter::kPagesUnmapped:
      return "pages_unmapped";
    case Counter::kPagesCreated:
      return "pages_created";
    case Counter::kPagesDestroyed:
      return "pages_destroyed";
    case Counter::kAllocs:
      return "allocs";
    case Counter::kFrees:
      return "frees";
    case Counter::kAllocFailures:
      return "alloc_failures";
    case Counter::kBlocksEvicted:
      return "blocks_evicted";
    case Counter::kRequestsApplied:
      return "requests_applied";
    case Counter::kProvisionRuns:
      return "provision_runs";
    case Counter::kBlocksMoved:
      return "blocks_moved";
    case Counter::kBlocksDemoted:
      return "blocks_demoted";
    case Counter::kBlocksDropped:
      return "blocks_dropped";
    case Counter::kCount:
      break;
  }
  return "unknown";
}

std::string_view text_of(std::span<const char> field) {
  return {field.data(), strnlen(field.data(), field.size())};
}

std::optional<std::uint32_t> control_block_version(std::span<const std::byte> bytes) {
  std::uint64_t magic = 0;
  std::uint32_t version = 0;
  if (bytes.size() < sizeof(magic) + sizeof(version)) return std::nullopt;
  std::memcpy(&magic, bytes.data(), sizeof(magic));
  std::memcpy(&version, bytes.data() + offsetof(ControlBlockHeader, abi_version), sizeof(version));
  if (magic != kControlBlockMagic) return std::nullopt;
  return version;
}

// ------------------------------------------------------------------------------------- readers

Result<ControlBlockView> ControlBlockView::open(std::span<const std::byte> bytes) {
  if (Status valid = validate(bytes); !valid) return valid.error();
  if (!is_aligned(bytes.data())) return misaligned();
  return ControlBlockView(reinterpret_cast<const ControlBlockLayout*>(bytes.data()));
}

std::optional<InstanceState> ControlBlockView::state() const {
  const auto state = static_cast<InstanceState>(__atomic_load_n(&layout_->state, __ATOMIC_ACQUIRE));
  if (state == InstanceState::kAlive || state == InstanceState::kClosing) return state;
  return std::nullopt;
}

std::uint64_t ControlBlockView::counter(Counter counter) const {
  return __atomic_load_n(&layout_->counters[static_cast<std::size_t>(counter)], __ATOMIC_RELAXED);
}

EngineSleep ControlBlockView::engine_sleep() const {
  const std::uint64_t said = __atomic_load_n(&layout_->engine_sleep, __ATOMIC_RELAXED);
  return said <= static_cast<std::uint64_t>(EngineSleep::kAsleep) ? static_cast<EngineSleep>(said)
                                                                  : EngineSleep::kUnknown;
}

std::string ControlBlockView::reason_of(const Ack& ack) const {
  std::string reason(text_of(ack.reason));
  if (ack.rest == 0) return reason;
  ReasonRest rest;
  if (latch_read(layout_->reason_rest, rest) && rest.number == ack.rest)
    return reason.append(text_of(rest.text));
  return reason.replace(reason.size() - std::min<std::size_t>(3, reason.size()), 3, "...");
}

bool ControlBlockView::wait_ack(std::uint64_t revision, bool settled,
                                std::int64_t timeout_ns) const {
  const Deadline deadline(timeout_ns);
  for (;;) {
    const std::uint32_t seen = layout_->ack_bell.load(std::memory_order_acquire);
    Ack ack;
    if (read_ack(ack) && ack.revision >= revision &&
        !(settled && ack.state == AckState::kShrinking)) {
      return true;
    }
    if (deadline.over()) return false;
    futex_wait(layout_->ack_bell, seen, deadline.left());
  }
}

// --------------------------------------------------------------------------------- request writers

Result<RequestWriter> RequestWriter::open(std::span<std::byte> bytes) {
  if (Status valid = validate(bytes); !valid) return valid.error();
  if (!is_aligned(bytes.data())) return misaligned();
  return RequestWriter(reinterpret_cast<ControlBlockLayout*>(bytes.data()));
}

Status check_priority(std::int64_t priority) {
  if (priority >= -kMaxPriority && priority <= kMaxPriority) return ok();
  const std::string most = std::to_string(kMaxPriority);
  return Error{Errc::kInvalidArgument, "priority=" + std::to_string(priority) +
                                           " is not accepted; it must be -" + most + " to " + most};
}

Request RequestWriter::next(const RequestChange& change) const {
  Request request;
  // Cannot fail: the writers' lock excludes other writers.
  (void)latch_read(layout_->request, request);
  request.revision = __atomic_load_n(&layout_->request.revision, __ATOMIC_ACQUIRE) + 1;
  if (change.limit_bytes) {
    request.limit_bytes = *change.limit_bytes;
    request.limit_revision = request.revision;
  }
  if (change.min_bytes) {
    request.min_bytes = *change.min_bytes;
    request.min_revision = request.revision;
  }
  if (change.priority) {
    request.priority = *change.priority;
    request.priority_revision = request.revision;
  }
  if (change.asleep) {
    request.asleep = *change.asleep ? 1 : 0;
    request.asleep_revision = request.revision;
  }
  if (change.trim) request.trim_revision = request.revision;
  request.writer_pid = static_cast<std::uint64_t>(getpid());
  request.written_ns = monotonic_ns();
  return request;
}

std::uint64_t RequestWriter::write(const RequestChange& change) {
  const Request request = next(change);
  latch_write(layout_->request, request, request.revision);
  ring_bell();
  return request.revision;
}

void RequestWriter::ring_bell() {
  kvelastic::ring_bell(layout_->bell);
}

void RequestWriter::write_half(const RequestChange& change) {
  const Request request = next(change);
  const auto words = std::bit_cast<std::array<std::uint64_t, sizeof(Request) / 8>>(request);
  auto& slot = layout_->request.slots[request.revision & 1];
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (std::size_t i = 0; i < words.size() / 2; ++i) {
    __atomic_store_n(&slot[i], ~words[i], __ATOMIC_RELAXED);
  }
}

// ---------------------------------------------------------------------------------------- owner

Result<std::unique_ptr<ControlBlockOwner>> ControlBlockOwner::create(
    std::span<std::byte> bytes, const ControlBlockIdentity& identity) {
  if (bytes.size() < kSegmentBytes) {
    return Error{Errc::kInvalidArgument, "a segment needs " + std::to_string(kSegmentBytes) +
                                             " bytes, not " + std::to_string(bytes.size())};
  }
  if (!is_aligned(bytes.data())) return misaligned();
  ControlBlockHeader header{};
  header.magic = kControlBlockMagic;
  header.abi_version = kControlBlockAbiVersion;
  header.header_bytes = sizeof(ControlBlockHeader);
  header.total_bytes = kSegmentBytes;
  header.ring_offset = kControlBlockBytes;
  header.ring_bytes = kRingAreaBytes;
  header.uuid = identity.uuid;
  header.owner_pid = identity.owner_pid;
  header.owner_start_ticks = identity.owner_start_ticks;
  header.boot_id = identity.boot_id;
  header.pid_namespace = identity.pid_namespace;
  header.owner_uid = identity.owner_uid;
  header.created_realtime_ns = identity.created_realtime_ns;
  if (Status s = copy_text(header.name, identity.name, "name"); !s) return s.error();
  if (Status s = copy_text(header.engine, identity.engine, "engine"); !s) return s.error();
  if (Status s = copy_text(header.model, identity.model, "model"); !s) return s.error();
  if (identity.devices.empty() || identity.devices.size() > kControlBlockDevices) {
    return Error{Errc::kInvalidArgument,
                 "an instance has pages on 1 to " + std::to_string(kControlBlockDevices) +
                     " devices, not on " + std::to_string(identity.devices.size())};
  }
  for (std::size_t i = 0; i < identity.devices.size(); ++i) {
    const auto& [name, copies] = identity.devices[i];
    if (Status s = copy_text(header.devices[i].name, name, "device"); !s) return s.error();
    if (copies == 0) return Error{Errc::kInvalidArgument, "no copy of a page is on " + name};
    header.devices[i].copies = copies;
  }
  header.crc32 = header_crc(header);

  auto* layout = reinterpret_cast<ControlBlockLayout*>(bytes.data());
  std::memset(bytes.data(), 0, kSegmentBytes);
  layout->header = header;
  std::unique_ptr<ControlBlockOwner> owner(
      new ControlBlockOwner(layout, bytes.subspan(kControlBlockBytes, kRingAreaBytes)));
  owner->set_state(InstanceState::kAlive);
  return owner;
}

void ControlBlockOwner::set_state(InstanceState state) {
  __atomic_store_n(&layout_->state, static_cast<std::uint32_t>(state), __ATOMIC_RELEASE);
  kvelastic::ring_bell(layout_->ack_bell);  // waiters must see that the instance is closing
}

std::optional<Request> ControlBlockOwner::read_request() const {
  Request request;
  if (!latch_read(layout_->request, request, kRequestReadTries) || request.revision == 0)
    return std::nullopt;
  return request;
}

bool ControlBlockOwner::wait_bell(std::uint32_t seen, std::int64_t timeout_ns) const {
  const Deadline deadline(timeout_ns);
  while (bell() == seen) {
    if (deadline.over()) return false;
    futex_wait(layout_->bell, seen, deadline.left());
  }
  return true;
}

void ControlBlockOwner::set_engine_sleep(EngineSleep sleep) {
  __atomic_store_n(&layout_->engine_sleep, static_cast<std::uint64_t>(sleep), __ATOMIC_RELAXED);
}

void ControlBlockOwner::ring_bell() {
  kvelastic::ring_bell(layout_->bell);
}

void ControlBlockOwner::on_usage(std::function<void(const Usage&)> on_usage) {
  const std::lock_guard<std::mutex> lock(usage_mutex_);
  on_usage_ = std::move(on_usage);
  if (!on_usage_) return;
  Usage last;
  (void)latch_read(layout_->usage, last);  // cannot fail: the lock excludes writers
  on_usage_(last);
}

void ControlBlockOwner::acknowledge(Ack ack, std::string_view reason) {
  if (ack.acknowledged_ns == 0) ack.acknowledged_ns = monotonic_ns();
  ReasonRest rest;
  if (!reason.empty()) {
    std::string shown(reason.substr(0, kReasonBytes));
    if (reason.size() > kReasonBytes) shown.replace(kReasonBytes - 3, 3, "...");
    ack.reason.fill('\0');
    shown.copy(ack.reason.data(), ack.reason.size());
    if (shown.size() > ack.reason.size())
      shown.copy(rest.text.data(), rest.text.size(), ack.reason.size());
  }
  {
    const std::lock_guard<std::mutex> lock(ack_mutex_);
    ack.rest = 0;
    if (rest.text.front() != '\0') {
      const std::uint64_t revision = layout_->reason_rest.revision + 1;
      // Writers of earlier versions leave the number 0.
      rest.number = ack.rest = static_cast<std::uint32_t>(revision | 1U << 31);
      latch_write(layout_->reason_rest, rest, revision);
    }
    latch_write(layout_->ack, ack, layout_->ack.revision + 1);
  }
  kvelastic::ring_bell(layout_->ack_bell);
}

}  // namespace kvelastic
