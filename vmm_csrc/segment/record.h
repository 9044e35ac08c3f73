// The record: the struct at the start of an instance's segment, and the only place that knows its
// layout. C++ and Python (through bind/record.cpp) read and write it with the classes below.
//
//   header       identity, written once before the segment is visible; under a CRC
//   state, bells one word each, on lines of their own
//   request         operator -> instance     one writer at a time (they share a lock on the file)
//   answer       instance -> operator     owner only
//   usage        instance -> anyone       owner only
//   counters     instance -> anyone       owner only
//   reason_rest  instance -> operator     owner only: the end of a long reason of `answer`
//   spare        zero today; a later field goes here and keeps the ABI version
//   ring area    after the record: the scheduler's ring to its workers (ring_memory.h)
//
// Request, answer and usage are *latches*: two slots and a revision, where revision r lies in slot
// r & 1. A writer fills the slot that nobody is told to read and then stores the revision, so
//   - a writer killed (or stopped) half-way has changed nothing that a reader looks at,
//   - a reader finds a whole value at once; it looks again only if two newer values came meanwhile,
//   - nobody ever waits for anybody: a reader may map the segment PROT_READ.
//
// All integers are little-endian and naturally aligned. Times are CLOCK_MONOTONIC nanoseconds
// (comparable between processes of one boot) unless a name says realtime.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
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

static_assert(std::endian::native == std::endian::little, "the record is little-endian");

inline constexpr std::uint64_t kRecordMagic = 0x4354'5341'4c45'564bULL;  ///< "KVELASTC" in memory
inline constexpr std::uint32_t kRecordAbiVersion = 5;
inline constexpr std::size_t kLineBytes = 64;
inline constexpr std::size_t kRecordBytes = 4096;
inline constexpr std::size_t kRingAreaBytes = std::size_t{256} << 10;
inline constexpr std::size_t kSegmentBytes = kRecordBytes + kRingAreaBytes;

/// The limit of an instance that has none: it may use its whole device.
inline constexpr std::uint64_t kUnlimitedBytes = (std::uint64_t{1} << 63) - 1;

/// How often a reader tries again when the writer overtakes it, before it gives up.
inline constexpr int kLatchReadTries = 1000;
/// The same for the owner's look at a request: a few microseconds at most, whatever writers do.
inline constexpr int kRequestReadTries = 16;

// ---------------------------------------------------------------------------- the shared layout

/// A device with pages of the instance.
struct RecordDevice {
  std::array<char, 64> name;
  std::uint64_t copies;  ///< of each page, one for each rank; 0: no device
};
/// Of one instance.
inline constexpr std::size_t kRecordDevices = 16;

/// Texts are UTF-8, padded with zero bytes; one that fills its array has no zero byte at its end.
struct RecordHeader {
  std::uint64_t magic;
  std::uint32_t abi_version;
  std::uint32_t header_bytes;  ///< what the CRC covers
  std::uint64_t total_bytes;   ///< of the segment, with the ring area
  std::uint64_t ring_offset;
  std::uint64_t ring_bytes;
  std::uint32_t crc32;  ///< of the header with this field zero (the CRC of zlib)
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
  std::array<RecordDevice, kRecordDevices> devices;  ///< the first one's rank is the lowest
  std::array<std::uint64_t, 8> reserved3;
};

enum class InstanceState : std::uint32_t { kAlive = 1, kClosing = 2 };

/// The highest priority of an instance; the lowest is the same below zero.
inline constexpr std::int64_t kMaxPriority = 1000;

/// kInvalidArgument for a priority beyond +-kMaxPriority.
Status check_priority(std::int64_t priority);

/// What an operator wants. Revision 0 means that nobody has requested anything yet.
struct Request {
  std::uint64_t revision = 0;
  std::uint64_t limit_bytes = 0;    ///< never exceeded; 0 is a limit like any other
  std::uint64_t min_bytes = 0;      ///< the guarantee: never taken away by others
  std::int64_t priority = 0;        ///< higher keeps its memory longer
  std::uint64_t trim_revision = 0;  ///< the newest request to give back every parked page
  std::uint64_t writer_pid = 0;
  std::uint64_t written_ns = 0;
  /// The newest request that said something of that field; 0: none has, the instance keeps its own.
  /// Fields of one revision were requested together: they are done or refused together, whatever
  /// comes before the instance looks. A field that a later request changed belongs to that one.
  std::uint64_t limit_revision = 0, min_revision = 0, priority_revision = 0;
  std::uint64_t asleep = 0;  ///< 1: hold nothing until somebody requests 0
  std::uint64_t asleep_revision = 0;
};

enum class AnswerState : std::uint32_t {
  kNone = 0,       ///< no answer yet
  kApplied = 1,    ///< the limit holds now
  kShrinking = 2,  ///< no page is added; over_bytes are still to be given back
  kRefused = 3,    ///< nothing changed; reason says why
  kFailed = 4,     ///< the memory behind the instance has failed: it hands out no block any more
};

/// What the instance says to a request; several answers may follow one another for one revision.
struct Answer {
  std::uint64_t revision = 0;  ///< of the request that this answers
  std::uint64_t effective_limit_bytes = 0;
  std::uint64_t mapped_bytes = 0;
  std::uint64_t over_bytes = 0;
  std::uint64_t answered_ns = 0;
  AnswerState state = AnswerState::kNone;
  std::uint32_t rest = 0;  ///< the number of the `ReasonRest` with which `reason` goes on; 0: none
  std::uint64_t min_bytes = 0;
  std::int64_t priority = 0;
  std::array<char, 128> reason{};
};

/// The end of a reason that is longer than the room in `Answer`.
struct ReasonRest {
  std::uint64_t number = 0;
  std::array<char, 240> text{};
};

/// A reason that is longer ends in "...".
inline constexpr std::size_t kReasonBytes = sizeof(Answer::reason) + sizeof(ReasonRest::text);

/// Where the instance's memory is; all of its pools together.
struct Usage {
  std::uint64_t capacity_bytes = 0;  ///< of the device: what a percentage is taken of
  std::uint64_t mapped_bytes = 0;    ///< held: in use, cached, parked and padding
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
  std::uint64_t former_pools = 1;  ///< the number of pools to readers before 0.2; nobody sets it
  std::uint64_t updated_ns = 0;    ///< CLOCK_MONOTONIC_COARSE; set by publish_usage()
  std::uint64_t asleep = 0;       ///< 1: nothing is handed out, and nothing held that is not in use
  std::uint64_t limit_bytes = 0;  ///< as the operator set it, also in sleep; or kUnlimitedBytes
  std::uint64_t squeezed = 0;     ///< 1: it keeps to less than its limit, see Squeeze
  std::uint64_t mappings_per_page = 0;  ///< of one page, on all ranks; 0: not said
  /// Requests of the engine that wait for memory. An engine that reports nothing of them (one
  /// before 0.2, too) leaves all four zero.
  std::uint64_t reports_waiting = 0;  ///< 1: the engine reports them, so that 0 waiting means none
  std::uint64_t requests_waiting = 0;
  std::uint64_t first_needs_bytes = 0;     ///< least limit for the first of them; 0: not known
  std::uint64_t first_may_need_bytes = 0;  ///< the same at its end, if its answer is the longest
  std::uint64_t reserved = 0;
};

/// Whether the engine itself sleeps (its weights, its requests), which the instance cannot change.
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

/// The name of a counter in `counters()` and in `kvctl list --json`.
std::string_view counter_name(Counter counter);

template <typename T>
struct Latch {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0 && alignof(T) == 8);
  alignas(kLineBytes) std::uint64_t revision;
  alignas(kLineBytes) std::array<std::array<std::uint64_t, sizeof(T) / 8>, 2> slots;
};

struct RecordLayout {
  RecordHeader header;
  alignas(kLineBytes) std::uint32_t state;
  alignas(kLineBytes) FutexWord bell;         ///< futex word: the owner waits here
  alignas(kLineBytes) FutexWord answer_bell;  ///< futex word: who awaits an answer
  Latch<Request> request;
  Latch<Answer> answer;
  std::array<std::uint64_t, 8> reserved0;
  Latch<Usage> usage;
  std::uint64_t engine_sleep;  ///< an EngineSleep
  std::array<std::uint64_t, 7> reserved1;
  std::array<std::uint64_t, kCounterRoom> counters;
  Latch<ReasonRest> reason_rest;
  std::array<std::uint8_t, 64> spare;
};

static_assert(std::is_standard_layout_v<RecordLayout>);
static_assert(offsetof(RecordHeader, abi_version) == 8);
static_assert(offsetof(RecordHeader, total_bytes) == 16);
static_assert(offsetof(RecordHeader, crc32) == 40);
static_assert(offsetof(RecordHeader, uuid) == 48);
static_assert(offsetof(RecordHeader, boot_id) == 80);
static_assert(offsetof(RecordHeader, created_realtime_ns) == 104);
static_assert(offsetof(RecordHeader, name) == 128);
static_assert(offsetof(RecordHeader, engine) == 192);
static_assert(offsetof(RecordHeader, model) == 256);
static_assert(offsetof(RecordHeader, devices) == 512);
static_assert(sizeof(RecordHeader) == 1728);
static_assert(sizeof(Request) == 96 && sizeof(Answer) == 192 && sizeof(Usage) == 192);
static_assert(offsetof(RecordLayout, state) == 1728);
static_assert(offsetof(RecordLayout, bell) == 1792);
static_assert(offsetof(RecordLayout, answer_bell) == 1856);
static_assert(offsetof(RecordLayout, request) == 1920);
static_assert(offsetof(RecordLayout, answer) == 2176);
static_assert(offsetof(RecordLayout, usage) == 2688);
static_assert(offsetof(RecordLayout, engine_sleep) == 3136);
static_assert(offsetof(RecordLayout, counters) == 3200);
static_assert(offsetof(RecordLayout, reason_rest) == 3456);
static_assert(offsetof(RecordLayout, spare) == 4032);
static_assert(sizeof(RecordLayout) == kRecordBytes);

// ------------------------------------------------------------------------------------- latches

/// Makes `value` the newest, as `revision`, which must be one more than the last one. One writer.
template <typename T>
inline void latch_write(Latch<T>& latch, const T& value, std::uint64_t revision) {
  const auto words = std::bit_cast<std::array<std::uint64_t, sizeof(T) / 8>>(value);
  auto& slot = latch.slots[revision & 1];
  // A reader that sees any word written below must also see that its own revision is history:
  // this fence pairs with the one in latch_read().
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (std::size_t i = 0; i < words.size(); ++i) {
    __atomic_store_n(&slot[i], words[i], __ATOMIC_RELAXED);
  }
  __atomic_store_n(&latch.revision, revision, __ATOMIC_RELEASE);
}

/// Copies the newest value to `out` and returns true; false if the writer overtook every one of
/// `tries` copies (then `out` holds the last copy, which may be a mix of two values).
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
/// The clock's last tick (1 to 10 ms old): a memory read, never a system call.
std::uint64_t monotonic_coarse_ns();

/// The bytes up to the first zero byte, or all of them.
std::string_view text_of(std::span<const char> field);

/// The ABI version of bytes that start like a segment, of whatever version; nothing otherwise.
std::optional<std::uint32_t> record_version(std::span<const std::byte> bytes);

/// Reads a record; never writes, so the bytes may be mapped PROT_READ. Any thread, any process.
/// The bytes must outlive the view.
class RecordView {
 public:
  /// kSegmentFormat: bytes too few, magic, version, sizes or CRC wrong. kInvalidArgument: the
  /// bytes do not start at a multiple of kLineBytes (a mapping always does).
  static Result<RecordView> open(std::span<const std::byte> bytes);

  const RecordHeader& header() const { return layout_->header; }
  std::optional<InstanceState> state() const;  ///< nothing: no state of this version

  /// Each fills `out`; false: the writer was faster than kLatchReadTries looks (see latch_read).
  bool read_request(Request& out) const { return latch_read(layout_->request, out); }
  bool read_answer(Answer& out) const { return latch_read(layout_->answer, out); }
  bool read_usage(Usage& out) const { return latch_read(layout_->usage, out); }
  /// Why, of an answer that was read. Its end is "..." once a later answer has overwritten it.
  std::string reason_of(const Answer& answer) const;
  std::uint64_t counter(Counter counter) const;
  /// kUnknown also for a value that this version does not know.
  EngineSleep engine_sleep() const;

  /// Blocks until the instance has answered revision `revision` or a later one; with `settled`
  /// until that answer is no longer "shrinking". False: `timeout_ns` passed (negative: never).
  /// Signals do not end it.
  bool wait_answer(std::uint64_t revision, bool settled, std::int64_t timeout_ns) const;

 private:
  explicit RecordView(const RecordLayout* layout) : layout_(layout) {}
  const RecordLayout* layout_;
};

// --------------------------------------------------------------------------------- request writers

/// What to change; what is not set stays as the last request said.
struct RequestChange {
  std::optional<std::uint64_t> limit_bytes{};
  std::optional<std::uint64_t> min_bytes{};
  std::optional<std::int64_t> priority{};
  std::optional<bool> asleep{};
  bool trim = false;
};

/// Writes requests. Writers must hold an exclusive flock() on the segment's file from before
/// write() until after it; the instance never takes that lock.
class RequestWriter {
 public:
  /// Fails as RecordView::open.
  static Result<RequestWriter> open(std::span<std::byte> bytes);

  /// Publishes the request, wakes the instance and returns the request's revision.
  std::uint64_t write(const RequestChange& change);
  /// Wakes the instance without a request.
  void ring_bell();

  /// For tests only: the first half of write(), as if the writer died there.
  void write_half(const RequestChange& change);

 private:
  explicit RequestWriter(RecordLayout* layout) : layout_(layout) {}
  Request next(const RequestChange& change) const;
  RecordLayout* layout_;
};

// ---------------------------------------------------------------------------------------- owner

/// Who makes a segment.
struct RecordIdentity {
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

/// The instance's own end. All calls from any thread of the owner; none takes a lock that another
/// process can hold. The bytes must outlive it.
class RecordOwner {
 public:
  /// Clears the bytes and fills the header; they must not be visible to others yet.
  /// kInvalidArgument: fewer than kSegmentBytes, not aligned to 64, a text that does not
  /// fit, no device, or more than kRecordDevices.
  static Result<std::unique_ptr<RecordOwner>> create(std::span<std::byte> bytes,
                                                     const RecordIdentity& identity);

  const RecordHeader& header() const { return layout_->header; }
  /// kRingAreaBytes, zeroed, aligned to 4096 in a mapped segment.
  std::span<std::byte> ring_area() const { return ring_; }

  void set_state(InstanceState state);
  void set_engine_sleep(EngineSleep sleep);

  /// The newest request; nothing if there is none yet, or if writers change it faster than it can
  /// be read (then look again later). A few microseconds at most.
  std::optional<Request> read_request() const;
  /// One load: compare with the last request's revision before the longer read_request().
  std::uint64_t request_revision() const {
    return __atomic_load_n(&layout_->request.revision, __ATOMIC_ACQUIRE);
  }

  /// Waiting without losing a ring:
  ///   seen = bell(); <look at request_revision() and at whatever else is to do>; wait_bell(seen,
  ///   t);
  std::uint32_t bell() const { return layout_->bell.load(std::memory_order_acquire); }
  /// Blocks until the bell differs from `seen`: true. False when `timeout_ns` has passed
  /// (negative: never). Signals do not end it.
  bool wait_bell(std::uint32_t seen, std::int64_t timeout_ns) const;
  /// Wakes the thread that waits on the bell, from this or another process.
  void ring_bell();

  /// Publishes an answer and wakes those who wait for one. Sets answered_ns if it is 0.
  void answer(Answer answer, std::string_view reason = {});

  /// Publishes the usage; under 0.2 us and no system call.
  void publish_usage(Usage usage) {
    usage.updated_ns = monotonic_coarse_ns();
    const std::lock_guard<std::mutex> lock(usage_mutex_);
    latch_write(layout_->usage, usage, layout_->usage.revision + 1);
  }

  void add(Counter counter, std::uint64_t amount = 1) {
    __atomic_fetch_add(&layout_->counters[static_cast<std::size_t>(counter)], amount,
                       __ATOMIC_RELAXED);
  }

 private:
  RecordOwner(RecordLayout* layout, std::span<std::byte> ring) : layout_(layout), ring_(ring) {}
  RecordLayout* layout_;
  std::span<std::byte> ring_;
  std::mutex usage_mutex_;  // between threads of the owner only
  std::mutex answer_mutex_;
};

}  // namespace kvelastic
