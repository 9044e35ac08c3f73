// Commands from the scheduler process to its worker processes, through shared memory: page indices
// one way, results the other. No pickle, no socket, no Python on the workers' side.
//
//   scheduler                      shared memory                       each worker (rank)
//   post(map, pages)  ->  entries[seq % kEntries] = command   ->  its thread wakes (posted bell),
//                         posted = seq + 1                        runs the command on its Range,
//   all are done      <-  each rank's result, done = seq + 1  <-  the last one rings (answered
//   bell)
//
// A command is one operation over all ranks. A page that is mapped in one of them is prepared, no
// more: no id of it is handed out before all have mapped it, and where one could not the others
// unmap it again. So there is nothing to commit but the answer.
//
// A GPU may still be at work with pages that are to be unmapped. No command waits for that: kFence
// is answered when the worker has marked the work given to its device so far, and `passed` says
// later when that is done. Commands go on meanwhile, so a map never waits behind a kernel.
//
//   post(fence, 7)    ->  its thread asks the driver for a fence, answers, and looks at it now and
//                         then, between commands
//   all have passed 7 <-  each rank's passed = 7 (or why it failed); rings (answered bell)
//   post(unmap, pages) -> at once
//
// One producer at a time (RingBacking holds a lock), one consumer a rank. An entry is written by
// the producer before `posted` passes it, a rank's slot by its worker before its `done` does.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/futex.h"
#include "base/status.h"
#include "pages/geometry.h"
#include "pages/staging_window.h"

namespace kvelastic {

/// The ring as it lies in shared memory. Only fixed-size integers: two builds must agree on it.
struct RingMemory {
  static constexpr std::uint32_t kMagic = 0x6b76726e;  // "kvrn"
  static constexpr std::uint32_t kVersion = 8;
  static constexpr std::size_t kEntries = 64;
  static constexpr std::size_t kPagesPerEntry = 480;
  static constexpr std::size_t kMaxRanks = 64;

  enum class Command : std::uint32_t {
    kMap = 1,
    kUnmap = 2,
    kCopy = 3,
    kNothing = 4,
    kFence = 5,
    kStaging = 6,  ///< attach the staging that the words name
    kCopyOut = 7,  ///< blocks into slots of it
    kCopyIn = 8,   ///< and back
    kLook = 9,     ///< what the device has left
  };
  /// A rank is taken once: what its worker had mapped, a later one would not have.
  enum class WorkerState : std::uint32_t { kAbsent = 0, kTaken = 1, kServing = 2, kGone = 3 };

  static constexpr std::uint32_t kDone = 0;
  static std::uint32_t result_of(const Status& status) {
    return status ? kDone : 1 + static_cast<std::uint32_t>(status.error().code);
  }
  /// Pre: not kDone.
  static Errc code_of(std::uint32_t result) { return static_cast<Errc>(result - 1); }

  struct Entry {
    std::uint32_t command;
    std::uint32_t count;
    std::uint64_t ranks;  ///< a bit each: who carries it out
    std::array<std::uint32_t, kPagesPerEntry>
        pages;  ///< kCopy, kCopyOut, kCopyIn: pairs of 64 bits; kStaging: its name; kFence: number
  };

  /// Why something failed, cut to fit.
  struct Reason {
    std::uint32_t bytes;
    std::array<char, 200> text;

    void write(const std::string& message);
    std::string read() const;
  };

  /// One worker's own.
  struct alignas(64) Rank {
    FutexWord done;  ///< commands answered so far, modulo 2^32
    std::atomic<std::uint32_t> state;
    std::atomic<std::int32_t> pid;
    std::uint32_t result;                           ///< of the last command: kDone, or 1 + Errc
    std::atomic<std::uint64_t> start_ticks;         ///< tells a reused pid from the worker's
    std::atomic<std::uint64_t> device_total_bytes;  ///< as it sees its GPU; 0: the host
    std::atomic<std::uint64_t> device_free_bytes;
    std::uint32_t works_behind;  ///< as Driver::works_behind; stands before kServing does
    Reason reason;               ///< of `result`
    // The fence: one at a time.
    std::atomic<std::uint32_t> passed;  ///< number of the last that has passed, or failed
    std::atomic<std::uint32_t> looks;   ///< goes up as long as the worker looks at one
    std::uint32_t fence_result;         ///< of `passed`, as `result`; written before it
    Reason fence_reason;
  };
  static_assert(sizeof(Rank) == 512);

  std::uint32_t magic;
  std::uint32_t version;
  Geometry geometry;  ///< the scheduler's; a worker refuses to serve another one
  std::uint32_t ranks;
  std::atomic<std::uint64_t> keep_free_bytes;  ///< the scheduler's: see Driver::keep_free
  alignas(64) FutexWord posted;                ///< commands posted so far, modulo 2^32
  alignas(64) FutexWord answered;              ///< bell: every rank has answered
  FutexWord attached;                          ///< bell: a rank's state has changed
  std::array<Rank, kMaxRanks> workers;
  alignas(64) std::array<Entry, kEntries> entries;
};
static_assert(std::is_standard_layout_v<RingMemory>);
static_assert(sizeof(RingMemory) <= 192 * 1024, "must fit the segment's ring area");

/// The memory as a ring, whatever it holds. Fails with kInvalidArgument where it is too small or
/// misaligned.
Result<RingMemory*> as_ring(std::span<std::byte> memory);

/// Numbers of 64 bits lie in an entry as two words, the low one first. Both ids of a move:
inline constexpr std::size_t kRingWordsPerMove = 4;
std::vector<std::uint32_t> ring_words_of(std::span<const BlockMove> moves);
std::vector<BlockMove> moves_of_ring_words(std::span<const std::uint32_t> words);
/// The same for a block and its slot.
inline constexpr std::size_t kRingWordsPerBlockSlot = 4;
std::vector<std::uint32_t> ring_words_of(std::span<const BlockSlot> blocks);
std::vector<BlockSlot> block_slots_of_ring_words(std::span<const std::uint32_t> words);
/// And for the name of a staging.
std::vector<std::uint32_t> ring_words_of(const StagingName& name);
StagingName staging_of_ring_words(std::span<const std::uint32_t> words);

}  // namespace kvelastic
