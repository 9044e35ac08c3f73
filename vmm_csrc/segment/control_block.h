// The control block: the struct at the start of an instance's segment. This file alone defines its
// layout. C++ and Python (through bind/control_block.cpp) read and write it with the classes below.
//
// clang-format off
//   header        identity, written once before the segment is visible; under a CRC
//   state, bells  one word each, on separate cache lines
//   request       operator -> instance    one writer at a time (writers share a lock on the file)
//   ack           instance -> operator    owner only: the acknowledgement of a request
//   usage         instance -> anyone      owner only
//   counters      instance -> anyone      owner only
//   reason_rest   instance -> operator    owner only: the end of a long reason of `ack`
//   spare         zero today; a later field goes here and keeps the ABI version
//   ring area     after the control block: the scheduler's ring to its workers (ring_memory.h)
// clang-format on
//
// Request, ack, usage and reason_rest are *latches*: two slots and a revision. Revision r lies
// in slot r & 1. A writer fills the slot that readers do not use and then stores the revision:
//   - A writer that is killed or stopped half-way does not change what readers see.
//   - A reader gets a whole value at once. It retries only if two newer values were written
//     in the meantime.
//   - No process waits for another, and a reader may map the segment PROT_READ.
//
// All integers are little-endian and naturally aligned. Times are CLOCK_MONOTONIC nanoseconds
// (comparable between processes of one boot) unless the name contains `realtime`.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/futex.h"
#include "base/status.h"

namespace kvelastic {

static_assert(std::endian::native == std::endian::little, "the control block is little-endian");

inline constexpr std::uint64_t kControlBlockMagic =
    0x4354'5341'4c45'564bULL;  ///< "KVELASTC" in memory
inline constexpr std::uint32_t kControlBlockAbiVersion = 5;
inline constexpr std::size_t kLineBytes = 64;
inline constexpr std::size_t kControlBlockBytes = 4096;
inline constexpr std::size_t kRingAreaBytes = std::size_t{256} << 10;
inline constexpr std::size_t kSegmentBytes = kControlBlockBytes + kRingAreaBytes;

/// The limit of an instance without a limit: it may use its whole device.
inline constexpr std::uint64_t kUnlimitedBytes = (std::uint64_t{1} << 63) - 1;

/// How many times a reader retries if the writer overtakes it.
inline constexpr int kLatchReadTries = 1000;
/// Retries of the owner when it reads a request: bounds the call to a few microseconds.
inline constexpr int kRequestReadTries = 16;

// ---------------------------------------------------------------------------- the shared layout

/// A device that has pages of the instance.
struct ControlBlockDevice {
  std::array<char, 64> name;
  std::uint64_t copies;  ///< copies of each page, one per rank; 0: unused entry
};
/// Per instance.
inline constexpr std::size_t kControlBlockDevices = 16;

/// Texts are UTF-8, padded with zero bytes. A text that fills its array has no terminating zero.
struct ControlBlockHeader {
  std::uint64_t magic;
  std::uint32_t abi_version;
  std::uint32_t header_bytes;  ///< bytes under the CRC
  std::uint64_t total_bytes;   ///< of the segment, including the ring area
  std::uint64_t ring_offset;
  std::uint64_t ring_bytes;
  std::uint32_t crc32;  ///< zlib's CRC-32 of the header with this field zero
  std::uint32_t owner_pid;
  std::array<std::uint8_t, 16> uuid;
  std::uint64_t owner_start_ticks;  ///< field 22 of /proc/PID/stat
  std::uint64_t pid_namespace;      ///< inode of /proc/PID/ns/pid
  std::array<std::uint8_t, 16> boot_id;
  std::uint32_t owner_uid;
  std::uint32_t reserved0;
  std::uint64_t created_realtime_ns;
  std::array<std::uint64_t, 2> reserved1;
  std::array<char, 64> name;
  std::array<char, 32> engine;
  std::array<std::uint64_t, 4> reserved2;
  std::array<char, 256> model;
  std::array<ControlBlockDevice, kControlBlockDevices> devices;  ///< ordered by lowest rank
  std::array<std::uint64_t, 8> reserved3;
};

enum class InstanceState : std::uint32_t { kAlive = 1, kClosing = 2 };

/// The highest priority of an instance; the lowest is -kMaxPriority.
inline constexpr std::int64_t kMaxPriority = 1000;

/// Fails with kInvalidArgument for a priority outside +-kMaxPriority.
Status check_priority(std::int64_t priority);

/// The configuration that an operator requests. Revision 0: no request has been written yet.
struct Request {
  std::uint64_t revision = 0;
  std::uint64_t limit_bytes = 0;  ///< never exceeded; 0 is a valid limit
  std::uint64_t min_bytes = 0;    ///< the guarantee: memory that other instances never take
  std::int64_t priority = 0;      ///< higher keeps its memory longer
  std::uint64_t trim_revision =
      0;  ///< the newest revision that requested a trim, which unmaps every parked page
  std::uint64_t writer_pid = 0;
  std::uint64_t written_ns = 0;
  /// The newest revision that set the field; 0: the instance keeps its own value. Fields with the
  /// same revision were requested together and are applied or refused together, even if other
  /// requests follow before the instance reads them. A field that a later request changed belongs
  /// to the later one.
  std::uint64_t limit_revision = 0, min_revision = 0, priority_revision = 0;
  std::uint64_t asleep = 0;  ///< 1: the instance must hold no memory until a request sets 0
  std::uint64_t asleep_revision = 0;
};

enum class AckState : std::uint32_t {
  kNone = 0,       ///< no acknowledgement yet
  kApplied = 1,    ///< the limit is in effect
  kShrinking = 2,  ///< no page is added; over_bytes still have to be released
  kRefused = 3,    ///< nothing changed; `reason` explains why
  kFailed = 4,     ///< the instance's memory has failed: it allocates no further block
};

/// The acknowledgement of a request. One revision may get several in sequence.
struct Ack {
  std::uint64_t revision = 0;  ///< of the acknowledged request
  std::uint64_t effective_limit_bytes = 0;
  std::uint64_t mapped_bytes = 0;
  std::uint64_t over_bytes = 0;
  std::uint64_t acknowledged_ns = 0;
  AckState state = AckState::kNone;
  std::uint32_t rest = 0;  ///< the number of the `ReasonRest` that continues `reason`; 0: none
  std::uint64_t min_bytes = 0;
  std::int64_t priority = 0;
  std::array<char, 128> reason{};
};

/// The end of a reason that does not fit into `Ack`.
struct ReasonRest {
  std::uint64_t number = 0;
  std::array<char, 240> text{};
};

/// A longer reason is cut and ends in "...".
inline constexpr std::size_t kReasonBytes = sizeof(Ack::reason) + sizeof(ReasonRest::text);

/// The instance's memory usage, summed over its pools.
struct Usage {
  std::uint64_t capacity_bytes = 0;  ///< of the device: the base of percentages
  std::uint64_t mapped_bytes = 0;    ///< in use, cached, parked and padding
  std::uint64_t in_use_bytes = 0;
  std::uint64_t cached_bytes = 0;
  std::uint64_t parked_bytes = 0;
  std::uint64_t page_bytes = 0;  ///< of the first pool
  std::uint64_t blocks_total = 0;
  std::uint64_t blocks_in_use = 0;
  std::uint64_t blocks_cached = 0;
  std::uint64_t blocks_available = 0;
  std::uint64_t blocks_reserved = 0;
  std::uint64_t pages_mapped = 0;
  std::uint64_t pages_parked = 0;
  std::uint64_t former_pools = 1;  ///< the number of pools for readers before 0.2; always 1
  std::uint64_t updated_ns = 0;    ///< CLOCK_MONOTONIC_COARSE; set by publish_usage()
  std::uint64_t asleep =
      0;  ///< 1: no block is allocated, and no memory is held except for blocks in use
  std::uint64_t limit_bytes = 0;  ///< as the operator set it, also while asleep; or kUnlimitedBytes
  std::uint64_t under_pressure =
      0;  ///< 1: memory pressure keeps usage below the limit, see Pressure
  std::uint64_t mappings_per_page = 0;  ///< of one page, on all ranks; 0: unknown
  /// Requests of the engine that wait for memory. All four fields are zero if the engine does not
  /// report them, as engines before 0.2 do not.
  std::uint64_t reports_waiting =
      0;  ///< 1: the engine reports requests, so 0 waiting means that none waits
  std::uint64_t requests_waiting = 0;
  std::uint64_t first_needs_bytes = 0;  ///< least limit that admits the first of them; 0: unknown
  std::uint64_t first_may_need_bytes = 0;  ///< least limit if its output has the maximum length
  std::uint64_t reserved = 0;
};

/// Whether the engine itself sleeps (weights and requests). The instance cannot change that.
enum class EngineSleep : std::uint64_t { kUnknown = 0, kAwake = 1, kAsleep = 2 };

enum class Counter : std::uint32_t {
  kPagesMapped,
  kPagesUnmapped,
  kPagesCreated,
  kPagesDestroyed,
  kAllocs,
  kFrees,
  kAllocFailures,
  kBlocksEvicted,
  kRequestsApplied,
  kProvisionRuns,
  kBlocksMoved,
  kBlocksDemoted,
  kBlocksDropped,
  kCount,
};
inline constexpr std::size_t kCounterRoom = 32;
static_assert(static_cast<std::size_t>(Counter::kCount) <= kCounterRoom);

/// The counter's name in `counters()` and in `kvctl list --json`.
std::string_view counter_name(Counter counter);

template <typename T>
struct Latch {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0 && alignof(T) == 8);
  alignas(kLineBytes) std::uint64_t revision;
  alignas(kLineBytes) std::array<std::array<std::uint64_t, sizeof(T) / 8>, 2> slots;
};

struct ControlBlockLayout {
  ControlBlockHeader header;
  alignas(kLineBytes) std::uint32_t state;
  alignas(kLineBytes) FutexWord bell;  ///< futex word: the owner waits here
  alignas(
      kLineBytes) FutexWord ack_bell;  ///< futex word: requesters wait here for an acknowledgement
  Latch<Request> request;
  Latch<Ack> ack;
  std::array<std::uint64_t, 8> reserved0;
  Latch<Usage> usage;
  std::uint64_t engine_sleep;  ///< an EngineSleep
  std::array<std::uint64_t, 7> reserved1;
  std::array<std::uint64_t, kCounterRoom> counters;
  Latch<ReasonRest> reason_rest;
  std::array<std::uint8_t, 64> spare;
};

static_assert(std::is_standard_layout_v<ControlBlockLayout>);
static_assert(offsetof(ControlBlockHeader, abi_version) == 8);
static_assert(offsetof(ControlBlockHeader, total_bytes) == 16);
static_assert(offsetof(ControlBlockHeader, crc32) == 40);
static_assert(offsetof(ControlBlockHeader, uuid) == 48);
static_assert(offsetof(ControlBlockHeader, boot_id) == 80);
static_assert(offsetof(ControlBlockHeader, created_realtime_ns) == 104);
static_assert(offsetof(ControlBlockHeader, name) == 128);
static_assert(offsetof(ControlBlockHeader, engine) == 192);
static_assert(offsetof(ControlBlockHeader, model) == 256);
static_assert(offsetof(ControlBlockHeader, devices) == 512);
static_assert(sizeof(ControlBlockHeader) == 1728);
static_assert(sizeof(Request) == 96 && sizeof(Ack) == 192 && sizeof(Usage) == 192);
static_assert(offsetof(ControlBlockLayout, state) == 1728);
static_assert(offsetof(ControlBlockLayout, bell) == 1792);
static_assert(offsetof(ControlBlockLayout, ack_bell) == 1856);
static_assert(offsetof(ControlBlockLayout, request) == 1920);
static_assert(offsetof(ControlBlockLayout, ack) == 2176);
static_assert(offsetof(ControlBlockLayout, usage) == 2688);
static_assert(offsetof(ControlBlockLayout, engine_sleep) == 3136);
static_assert(offsetof(ControlBlockLayout, counters) == 3200);
static_assert(offsetof(ControlBlockLayout, reason_rest) == 3456);
static_assert(offsetof(ControlBlockLayout, spare) == 4032);
static_assert(sizeof(ControlBlockLayout) == kControlBlockBytes);

// ------------------------------------------------------------------------------------- latches

/// Stores `value` as `revision`, which must be the last revision + 1. One writer at a time.
template <typename T>
inline void latch_write(Latch<T>& latch, const T& value, std::uint64_t revision) {
  const auto words = std::bit_cast<std::array<std::uint64_t, sizeof(T) / 8>>(value);
  auto& slot = latch.slots[revision & 1];
  // A reader that sees a word written below must also see that its revision is outdated. This fence
  // pairs with the fence in latch_read().
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (std::size_t i = 0; i < words.size(); ++i) {
    __atomic_store_n(&slot[i], words[i], __ATOMIC_RELAXED);
  }
  __atomic_store_n(&latch.revision, revision, __ATOMIC_RELEASE);
}

/// Copies the newest value to `out` and returns true. Returns false if the writer overtook each of
/// `tries` copies; `out` may then be a mix of two values.
template <typename T>
inline bool latch_read(const Latch<T>& latch, T& out, int tries = kLatchReadTries) {
  std::array<std::uint64_t, sizeof(T) / 8> words{};
  bool whole = false;
  for (int i = 0; i < tries && !whole; ++i) {
    const std::uint64_t before = __atomic_load_n(&latch.revision, __ATOMIC_ACQUIRE);
    const auto& slot = latch.slots[before & 1];
    for (std::size_t word = 0; word < words.size(); ++word) {
      words[word] = __atomic_load_n(&slot[word], __ATOMIC_RELAXED);
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    whole = __atomic_load_n(&latch.revision, __ATOMIC_RELAXED) == before;
  }
  out = std::bit_cast<T>(words);
  return whole;
}

// ------------------------------------------------------------------------------------- readers

std::uint64_t monotonic_ns();
/// The clock's last tick (1 to 10 ms old). Reads memory only; no system call.
std::uint64_t monotonic_coarse_ns();

/// Returns the bytes up to the first zero byte, or all bytes without one.
std::string_view text_of(std::span<const char> field);

/// Returns the ABI version if the bytes start like a segment of any version; otherwise empty.
std::optional<std::uint32_t> control_block_version(std::span<const std::byte> bytes);

/// Reads a control block and never writes, so the bytes may be mapped PROT_READ. Any thread, any
/// process. The bytes must outlive the view.
class ControlBlockView {
 public:
  /// Fails with kSegmentFormat if the size, magic, version, offsets or CRC are wrong, and with
  /// kInvalidArgument if the bytes are not aligned to kLineBytes (a mapping always is).
  static Result<ControlBlockView> open(std::span<const std::byte> bytes);

  const ControlBlockHeader& header() const { return layout_->header; }
  std::optional<InstanceState> state() const;  ///< empty: a state that this version does not know

  /// Each copies the newest value to `out`. Returns false if the writer overtook kLatchReadTries
  /// copies (see latch_read).
  bool read_request(Request& out) const { return latch_read(layout_->request, out); }
  bool read_ack(Ack& out) const { return latch_read(layout_->ack, out); }
  bool read_usage(Usage& out) const { return latch_read(layout_->usage, out); }
  /// The reason of an acknowledgement. Ends in "..." if a later one has overwritten the rest.
  std::string reason_of(const Ack& ack) const;
  std::uint64_t counter(Counter counter) const;
  /// Returns kUnknown for values that this version does not know.
  EngineSleep engine_sleep() const;

  /// Blocks until the instance has acknowledged `revision` or a later one; with `settled`, until
  /// its state is no longer kShrinking. Returns false after `timeout_ns` (negative: never). Signals
  /// do not interrupt the wait.
  bool wait_ack(std::uint64_t revision, bool settled, std::int64_t timeout_ns) const;

 private:
  friend class ControlBlockOwner;
  explicit ControlBlockView(const ControlBlockLayout* layout) : layout_(layout) {}
  const ControlBlockLayout* layout_;
};

// --------------------------------------------------------------------------------- request writers

/// Changes of a request. Fields that are not set keep their last requested values.
struct RequestChange {
  std::optional<std::uint64_t> limit_bytes{};
  std::optional<std::uint64_t> min_bytes{};
  std::optional<std::int64_t> priority{};
  std::optional<bool> asleep{};
  bool trim = false;
};

/// Writes requests. A writer must hold an exclusive flock() on the segment's file during write().
/// The instance never waits for that lock.
class RequestWriter {
 public:
  /// Fails as ControlBlockView::open.
  static Result<RequestWriter> open(std::span<std::byte> bytes);

  /// Publishes the request, wakes the instance and returns the new revision.
  std::uint64_t write(const RequestChange& change);
  /// Wakes the instance without a request.
  void ring_bell();

  /// For tests: only the first half of write(), as if the writer died there.
  void write_half(const RequestChange& change);

 private:
  friend class ControlBlockOwner;
  explicit RequestWriter(ControlBlockLayout* layout) : layout_(layout) {}
  Request next(const RequestChange& change) const;
  ControlBlockLayout* layout_;
};

// ---------------------------------------------------------------------------------------- owner

/// The identity of the process that creates a segment.
struct ControlBlockIdentity {
  std::array<std::uint8_t, 16> uuid{};
  std::uint32_t owner_pid = 0;
  std::uint64_t owner_start_ticks = 0;
  std::array<std::uint8_t, 16> boot_id{};
  std::uint64_t pid_namespace = 0;
  std::uint32_t owner_uid = 0;
  std::uint64_t created_realtime_ns = 0;
  std::string name;
  std::string engine;
  std::string model;
  std::vector<std::pair<std::string, std::uint64_t>> devices;  ///< name, copies of each page
};

/// The instance's end. Any thread of the owner. No call takes a lock that another process can hold.
/// The bytes must outlive this object.
class ControlBlockOwner {
 public:
  /// Clears the bytes and fills the header. Other processes must not see the bytes yet. Fails with
  /// kInvalidArgument for fewer than kSegmentBytes, bytes not aligned to 64, a text that does not
  /// fit, no device, or more than kControlBlockDevices.
  static Result<std::unique_ptr<ControlBlockOwner>> create(std::span<std::byte> bytes,
                                                           const ControlBlockIdentity& identity);

  const ControlBlockHeader& header() const { return layout_->header; }
  ControlBlockView view() const { return ControlBlockView(layout_); }
  /// For requests of this process to its own instance. The lock on the file is needed here, too.
  RequestWriter writer() { return RequestWriter(layout_); }
  /// kRingAreaBytes, zeroed; aligned to 4096 in a mapped segment.
  std::span<std::byte> ring_area() const { return ring_; }

  void set_state(InstanceState state);
  void set_engine_sleep(EngineSleep sleep);

  /// Returns the newest request. Empty if there is no request yet, or if writers change it faster
  /// than it can be read; then retry later. Takes a few microseconds at most.
  std::optional<Request> read_request() const;
  /// One load. Compare it with the last request's revision before calling read_request().
  std::uint64_t request_revision() const {
    return __atomic_load_n(&layout_->request.revision, __ATOMIC_ACQUIRE);
  }

  /// Waits without missing a ring:
  ///   seen = bell(); check request_revision() and other work; wait_bell(seen, timeout);
  std::uint32_t bell() const { return layout_->bell.load(std::memory_order_acquire); }
  /// Blocks until the bell differs from `seen` and returns true. Returns false after `timeout_ns`
  /// (negative: never). Signals do not interrupt the wait.
  bool wait_bell(std::uint32_t seen, std::int64_t timeout_ns) const;
  /// Wakes the thread that waits on the bell. Callable from any process.
  void ring_bell();

  /// Publishes an acknowledgement and wakes its waiters. Sets acknowledged_ns if it is 0.
  void acknowledge(Ack ack, std::string_view reason = {});

  /// Publishes the usage. Takes under 0.2 us and no system call besides on_usage().
  void publish_usage(Usage usage) {
    usage.updated_ns = monotonic_coarse_ns();
    const std::lock_guard<std::mutex> lock(usage_mutex_);
    latch_write(layout_->usage, usage, layout_->usage.revision + 1);
    if (on_usage_) on_usage_(usage);
  }
  /// Calls `on_usage` with the current usage, and from then on with each one that is published.
  /// Null ends that; a call that is running is waited for. `on_usage` must be quick and must not
  /// throw: publishers hold the pool's lock.
  void on_usage(std::function<void(const Usage&)> on_usage);

  void add(Counter counter, std::uint64_t amount = 1) {
    __atomic_fetch_add(&layout_->counters[static_cast<std::size_t>(counter)], amount,
                       __ATOMIC_RELAXED);
  }

 private:
  ControlBlockOwner(ControlBlockLayout* layout, std::span<std::byte> ring)
      : layout_(layout), ring_(ring) {}
  ControlBlockLayout* layout_;
  std::span<std::byte> ring_;
  std::mutex usage_mutex_;  // taken by the owner's threads only
  std::function<void(const Usage&)> on_usage_;
  std::mutex ack_mutex_;
};

}  // namespace kvelastic
