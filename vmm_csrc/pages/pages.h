// The handles of one page size: created on demand, kept for reuse, destroyed when the device needs
// the memory.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "driver/driver.h"

namespace kvelastic {

/// Thread-safe. A handle from acquire() belongs to the caller until it is returned.
class PageStore {
 public:
  PageStore(std::shared_ptr<Driver> driver, std::size_t handle_bytes)
      : driver_(std::move(driver)), handle_bytes_(handle_bytes) {}
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;
  ~PageStore() { (void)trim(); }

  /// Fills `out` with recycled handles first, then new ones, and returns the number of recycled
  /// ones. All or nothing: after a failure the created handles are destroyed. Fails with
  /// kOutOfMemory. Blocks while the driver creates pages.
  Result<std::size_t> acquire(std::span<Handle> out);

  /// Returns unused handles of acquire(): the first `recycled` are recycled again, the others
  /// destroyed. A failed map thus leaves the held bytes unchanged.
  void give_up(std::span<const Handle> handles, std::size_t recycled);

  /// Keeps the handles for the next acquire().
  void recycle(std::span<const Handle> handles);

  /// Destroys the handles and returns the first failure. Continues after a failure: a handle that
  /// could not be destroyed is kept as recycled, so its bytes stay counted.
  Status destroy(std::span<const Handle> handles);

  /// Destroys the recycled handles.
  Status trim();

  std::uint64_t handle_bytes() const { return handle_bytes_; }
  std::uint64_t recycled() const;

 private:
  const std::shared_ptr<Driver> driver_;
  const std::size_t handle_bytes_;
  mutable std::mutex mutex_;  // a leaf lock, never held across a driver call
  std::vector<Handle> recycled_;
};

}  // namespace kvelastic
