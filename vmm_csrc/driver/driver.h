// The one seam between kvelastic and an operating system or a GPU.
//
// Words (docs/ARCHITECTURE.md has all of them):
//   range    reserved addresses; reserving costs no memory
//   page     one physical allocation of the driver, named by a handle; mapped and unmapped whole.
//            Not the processor's 4 KiB page: where that one is meant the text says "system page".
//
// The life of a page:   create -> map -> set_access -> (use) -> unmap -> [map ...] -> destroy
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/status.h"

namespace kvelastic {

/// Names one created page. Handles of different drivers must not be mixed.
using Handle = std::uint64_t;

/// What a driver has done since it was made; read for tests, benchmarks and the record's counters.
struct DriverStats {
  std::uint64_t creates = 0;
  std::uint64_t destroys = 0;
  std::uint64_t maps = 0;
  std::uint64_t unmaps = 0;
  std::uint64_t small_pages = 0;  ///< created from 4 KiB system pages: no huge page was to be had
};

/// What memory a driver's addresses are.
struct DeviceKind {
  enum Type : std::uint8_t { kHost, kCuda } type = kHost;
  int ordinal = 0;  ///< of a GPU, as this process numbers them
};

/// What a device has and what nobody holds of it at this moment.
struct DeviceMemory {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;
};

/// Rows to be copied between mapped addresses of one driver; at both ends each row begins
/// `stride_bytes` after the one before.
struct CopyRun {
  std::byte* to;
  const std::byte* from;
  std::size_t row_bytes;
  std::size_t rows;
  std::size_t stride_bytes;
};

/// One run of rows between a device's memory and the host's: on the device each row begins
/// `stride_bytes` after the one before, on the host they lie side by side.
struct HostCopy {
  std::byte* device;
  std::byte* host;
  std::size_t row_bytes;
  std::size_t rows;
  std::size_t stride_bytes;
};

/// Which way a HostCopy goes.
enum class CopyTo : std::uint8_t { kHost, kDevice };

/// A point in a device's work: what was given to the device before it, and nothing later.
class Fence {
 public:
  Fence() = default;
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  virtual ~Fence() = default;

  /// Whether the device has finished that work. Never waits; any thread, one at a time.
  virtual Result<bool> has_passed() = 0;
};

/// Every call may be made from any thread, also at the same time; two calls at once must not name
/// the same addresses or the same handle. No call throws, aborts or prints. A call that fails has
/// changed nothing.
class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;

  /// Sizes and offsets of pages, and the start of every range, are multiples of this.
  virtual std::size_t granularity_bytes() const = 0;

  virtual DeviceKind device() const { return {}; }

  /// Reserves `bytes` of addresses, aligned to the granularity, holding no memory.
  /// Post: every address of the range faults when touched.
  /// Fails with kMapping when no such address range is left.
  virtual Result<std::byte*> reserve(std::size_t bytes) = 0;

  /// Gives a range back. Pre: nothing is mapped in it. `bytes` as it was reserved.
  virtual Status release(std::byte* address, std::size_t bytes) = 0;

  /// Creates a page of `bytes` (a multiple of the granularity), not mapped anywhere: zeroed on the
  /// host; on a GPU as the driver gives it, which nobody promises to be zeros. The memory is really
  /// there when this returns: a later touch cannot run out. Fails with kOutOfMemory when the device
  /// has none. The slow call: zeroing is in it.
  virtual Result<Handle> create(std::size_t bytes) = 0;

  /// Destroys a page: its memory is the device's again when this returns. Pre: not mapped.
  virtual Status destroy(Handle handle, std::size_t bytes) = 0;

  /// Maps a whole page at `address`, a multiple of the granularity inside a range of this driver.
  /// Pre: nothing is mapped there, and the page is mapped nowhere else.
  /// Post: the address belongs to the page; readable and writable after set_access.
  virtual Status map(std::byte* address, std::size_t bytes, Handle handle) = 0;

  /// Makes `bytes` of mapped addresses readable and writable. One call may cover a run of pages.
  virtual Status set_access(std::byte* address, std::size_t bytes) = 0;

  /// Unmaps a run of whole pages. Their contents stay with their handles.
  /// Post: the addresses fault when touched, as after reserve.
  virtual Status unmap(std::byte* address, std::size_t bytes) = 0;

  /// Whether work that was given to the device may still read or write pages when a call comes from
  /// here. False on the host: who frees a block has stopped using it.
  virtual bool works_behind() const { return false; }

  /// Marks the work given to the device so far that might read or write pages: pages that nobody
  /// uses any more may be unmapped when it has passed. Never waits. Null: there is nothing to wait
  /// for. A fence must not outlive its driver. Fails with kStreamsUnknown on a GPU whose driver was
  /// not told where that work is queued.
  virtual Result<std::unique_ptr<Fence>> fence() { return std::unique_ptr<Fence>(); }

  /// Blocks until a fence of this moment has passed, however long that takes. Fails as fence().
  Status drain();

  /// Copies runs that do not overlap; all of it is there when this returns. Pre: both ends are
  /// readable and writable, and nothing else writes them meanwhile.
  virtual Status copy(std::span<const CopyRun> runs) = 0;

  /// Copies rows to or from memory of the host; all of it is there when this returns. Calls of
  /// several threads may wait for each other. Pre: the device's end is mapped and stays so; nothing
  /// writes where it is copied to.
  virtual Status copy_host(std::span<const HostCopy> copies, CopyTo to) = 0;

  /// Makes memory of the host fast to copy from and to, until unpin_host() of the same: on a GPU it
  /// is pinned. Fails with kMapping; copies work all the same then.
  virtual Status pin_host(std::span<std::byte> /*memory*/) { return ok(); }
  virtual void unpin_host(std::span<std::byte> /*memory*/) {}

  /// The device's memory, where others take of it whom no ledger knows; none on the host, whose
  /// capacity is what was configured. Microseconds: never on a hot path.
  virtual std::optional<DeviceMemory> memory() const { return std::nullopt; }

  /// Leave so much more of the machine free than create() would, from now on: what the processes of
  /// an instance are about to allocate besides pages. Nothing on a GPU, where others say what is
  /// left.
  virtual void keep_free(std::uint64_t /*bytes*/) {}

  virtual DriverStats stats() const = 0;
};

}  // namespace kvelastic
