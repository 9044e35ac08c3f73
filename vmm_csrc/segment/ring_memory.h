// Commands from the scheduler process to its worker processes through shared memory: page indices
// one way, results the other. No pickle, no socket, and no Python in the workers.
//
// clang-format off
//   scheduler                  shared memory                      each worker (rank)
//   post(map, pages)    ->     entries[seq % kEntries] = command
//                              posted = seq + 1            ->     the bell `posted` wakes its thread;
//                                                                 it runs the command on its Range
//                              result, done = seq + 1      <-     of each rank
//   returns             <-     bell `replied`             <-     the last rank rings it
// clang-format on
//
// A command runs in all ranks. No block id of a page is allocated before every rank has mapped the
// page. If one rank fails, the others unmap the page again. So there is no separate commit step.
//
// A GPU may still use pages that are about to be unmapped. No command waits for that. A worker
// acknowledges kFence when it has marked the work submitted to its device so far, and sets `passed`
// when that work is complete. Other commands run in the meantime, so a map never waits for a
// kernel.
//
// clang-format off
//   post(fence, 7)      ->     its thread requests a fence from the driver, acknowledges, and
//                              polls the fence between commands
//   all have passed 7   <-     each rank's passed = 7 (or its failure); bell `replied`
//   post(unmap, pages)  ->     runs immediately
// clang-format on
//
// One producer at a time (RingBacking holds a lock), one consumer per rank. The producer writes an
// entry before it advances `posted`. A worker writes its rank's fields before it advances `done`.
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

/// The ring's layout in shared memory. Fixed-size integers only: both builds must agree on it.
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
    kStaging = 6,  ///< attach the staging named by the words
    kCopyOut = 7,  ///< copy blocks to staging slots
    kCopyIn = 8,   ///< copy staging slots to blocks
    kLook = 9,     ///< report the device's free memory
  };
  /// A rank is taken only once: a second worker would lack the pages that the first had mapped.
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
    std::uint64_t ranks;  ///< one bit per rank that executes it
    /// kCopy, kCopyOut, kCopyIn: pairs of 64-bit values; kStaging: its name; kFence: its number.
    std::array<std::uint32_t, kPagesPerEntry> pages;
  };

  /// The reason of a failure, cut to fit.
  struct Reason {
    std::uint32_t bytes;
    std::array<char, 200> text;

    void write(const std::string& message);
    std::string read() const;
  };

  /// The fields that one worker writes.
  struct alignas(64) Rank {
    FutexWord done;  ///< commands completed so far, modulo 2^32
    std::atomic<std::uint32_t> state;
    std::atomic<std::int32_t> pid;
    std::uint32_t result;  ///< of the last command: kDone, or 1 + Errc
    std::atomic<std::uint64_t>
        start_ticks;  ///< distinguishes the worker from a process that reuses its pid
    std::atomic<std::uint64_t> device_total_bytes;  ///< of its GPU; 0: the host
    std::atomic<std::uint64_t> device_free_bytes;
    std::uint32_t works_behind;  ///< as Driver::works_behind; written before kServing
    Reason reason;               ///< of `result`
    // The fence; one at a time.
    std::atomic<std::uint32_t> passed;  ///< number of the last fence that passed or failed
    std::atomic<std::uint32_t> looks;   ///< incremented whenever the worker polls the fence
    std::uint32_t fence_result;  ///< of `passed`, encoded as `result`; written before `passed`
    Reason fence_reason;
  };
  static_assert(sizeof(Rank) == 512);

  std::uint32_t magic;
  std::uint32_t version;
  Geometry geometry;  ///< the scheduler's; a worker with another geometry refuses to serve
  std::uint32_t ranks;
  std::atomic<std::uint64_t> keep_free_bytes;  ///< the scheduler's value of Driver::keep_free
  alignas(64) FutexWord posted;                ///< commands posted so far, modulo 2^32
  alignas(64) FutexWord replied;               ///< bell: every rank has replied
  FutexWord attached;                          ///< bell: a rank's state has changed
  std::array<Rank, kMaxRanks> workers;
  alignas(64) std::array<Entry, kEntries> entries;
};
static_assert(std::is_standard_layout_v<RingMemory>);
static_assert(sizeof(RingMemory) <= 192 * 1024, "must fit the segment's ring area");

/// Casts the memory to a ring without checking its contents. Fails with kInvalidArgument if it is
/// too small or misaligned.
Result<RingMemory*> as_ring(std::span<std::byte> memory);

/// Encoding of 64-bit values in an entry: two words, low word first. A move has two ids:
inline constexpr std::size_t kRingWordsPerMove = 4;
std::vector<std::uint32_t> ring_words_of(std::span<const BlockMove> moves);
std::vector<BlockMove> moves_of_ring_words(std::span<const std::uint32_t> words);
/// A block and its slot:
inline constexpr std::size_t kRingWordsPerBlockSlot = 4;
std::vector<std::uint32_t> ring_words_of(std::span<const BlockSlot> blocks);
std::vector<BlockSlot> block_slots_of_ring_words(std::span<const std::uint32_t> words);
/// The name of a staging:
std::vector<std::uint32_t> ring_words_of(const StagingName& name);
StagingName staging_of_ring_words(std::span<const std::uint32_t> words);

}  // namespace kvelastic
