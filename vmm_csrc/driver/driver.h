// The interface between kvelastic and an operating system or a GPU.
//
// Terms (docs/ARCHITECTURE.md has all of them):
//   range    reserved addresses; reserving uses no memory
//   page     one physical allocation of the driver, identified by a handle; mapped and unmapped as
//   a
//            whole. The processor's 4 KiB page is called "system page".
//
// Liveness cycle of a page:   create -> map -> set_access -> (use) -> unmap -> [map ...] -> destroy
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/status.h"

namespace kvelastic {

/// Identifies a created page. Handles of different drivers must not be mixed.
using Handle = std::uint64_t;

/// Operations since the driver was created; for tests, benchmarks and the segment's counters.
struct DriverStats {
  std::uint64_t creates = 0;
  std::uint64_t destroys = 0;
  std::uint64_t maps = 0;
  std::uint64_t unmaps = 0;
  std::uint64_t small_pages =
      0;  ///< created from 4 KiB system pages because no huge page was available
};

/// The kind of memory behind a driver's addresses.
struct DeviceKind {
  enum Type : std::uint8_t { kHost, kCuda } type = kHost;
  int ordinal = 0;  ///< of a GPU, in this process's numbering
};

/// A device's capacity and its free memory at this moment.
struct DeviceMemory {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;
};

/// Rows to copy between mapped addresses of one driver. At both ends, consecutive rows are
/// `stride_bytes` apart.
struct CopyRun {
  std::byte* to;
  const std::byte* from;
  std::size_t row_bytes;
  std::size_t rows;
  std::size_t stride_bytes;
};

/// Rows to copy between device and host memory. On the device, consecutive rows are `stride_bytes`
/// apart; on the host they are contiguous.
struct HostCopy {
  std::byte* device;
  std::byte* host;
  std::size_t row_bytes;
  std::size_t rows;
  std::size_t stride_bytes;
};

/// The direction of a HostCopy.
enum class CopyTo : std::uint8_t { kHost, kDevice };

/// A point in a device's work queue: it covers all work submitted before the fence was made.
class Fence {
 public:
  Fence() = default;
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  virtual ~Fence() = default;

  /// True if the device has finished that work. Never blocks. Any thread, one at a time.
  virtual Result<bool> has_passed() = 0;
};

/// Thread-safe, but concurrent calls must not use the same addresses or the same handle. No call
/// throws, aborts or prints. A failed call changes nothing.
class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;

  /// Page sizes, page offsets and range addresses are multiples of this.
  virtual std::size_t granularity_bytes() const = 0;

  virtual DeviceKind device() const { return {}; }

  /// Reserves `bytes` of addresses, aligned to the granularity, without memory.
  /// Post: every address of the range faults when touched.
  /// Fails with kMapping if the address space is exhausted.
  virtual Result<std::byte*> reserve(std::size_t bytes) = 0;

  /// Releases a range. `bytes` must be as reserved. Pre: nothing is mapped in the range.
  virtual Status release(std::byte* address, std::size_t bytes) = 0;

  /// Creates an unmapped page of `bytes`, a multiple of the granularity. Host pages are zeroed; the
  /// contents of GPU pages are undefined. The memory is committed on return, so a later touch
  /// cannot fail. Fails with kOutOfMemory if the device has no memory left. Slow, because it
  /// includes the zeroing.
  virtual Result<Handle> create(std::size_t bytes) = 0;

  /// Destroys a page. Its memory is free on return. Pre: the page is not mapped.
  virtual Status destroy(Handle handle, std::size_t bytes) = 0;

  /// Maps a whole page at `address`, a multiple of the granularity inside a range of this driver.
  /// Pre: nothing is mapped there, and the page is not mapped elsewhere.
  /// Post: the address belongs to the page; it is readable and writable after set_access.
  virtual Status map(std::byte* address, std::size_t bytes, Handle handle) = 0;

  /// Makes `bytes` of mapped addresses readable and writable. One call may cover several pages.
  virtual Status set_access(std::byte* address, std::size_t bytes) = 0;

  /// Unmaps a run of whole pages. Their handles keep the contents.
  /// Post: the addresses fault when touched, as after reserve.
  virtual Status unmap(std::byte* address, std::size_t bytes) = 0;

  /// True if the device executes asynchronously, so pages may still be in use when a call returns.
  /// False on the host: a caller that frees a block has stopped using it.
  virtual bool works_behind() const { return false; }

  /// Marks the work submitted to the device so far that may read or write pages. Unused pages may
  /// be unmapped once the fence has passed. Never blocks. Returns null if there is nothing to wait
  /// for. A fence must not outlive its driver. Fails with kStreamsUnknown on a GPU whose driver
  /// does not know the streams of that work, and with kMapping if it needs a thread that cannot be
  /// started.
  virtual Result<std::unique_ptr<Fence>> fence() { return std::unique_ptr<Fence>(); }

  /// Blocks until a fence made now has passed, without a deadline. Fails as fence().
  Status drain();

  /// Copies runs that do not overlap, and blocks until the copy is complete. Pre: both ends are
  /// readable and writable, and no other thread writes them during the call.
  virtual Status copy(std::span<const CopyRun> runs) = 0;

  /// Copies rows to or from host memory, and blocks until the copy is complete. Concurrent calls
  /// may run in any order. Pre: the device addresses stay mapped, and no other thread writes the
  /// destination.
  virtual Status copy_host(std::span<const HostCopy> copies, CopyTo to) = 0;

  /// Makes host memory fast to copy from and to until unpin_host() of the same memory: a GPU driver
  /// pins it. Fails with kMapping; copies then still work, only slower.
  virtual Status pin_host(std::span<std::byte> /*memory*/) { return ok(); }
  virtual void unpin_host(std::span<std::byte> /*memory*/) {}

  /// The device's memory, if processes unknown to the ledger may use it too; empty on the host,
  /// whose capacity is configured. Takes microseconds: not for a hot path.
  virtual std::optional<DeviceMemory> memory() const { return std::nullopt; }

  /// From now on, create() leaves this many bytes of the machine's memory free in addition to its
  /// margin. The processes of an instance are about to allocate them for other things than pages.
  /// No effect on a GPU.
  virtual void keep_free(std::uint64_t /*bytes*/) {}

  virtual DriverStats stats() const = 0;
};

}  // namespace kvelastic
