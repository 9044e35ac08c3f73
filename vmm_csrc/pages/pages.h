// The handles of one page size: created when needed, kept for the next use, destroyed when the
// device needs the bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "driver/driver.h"

namespace kvelastic {

/// Thread-safe. A handle that acquire() gave belongs to its caller until given back.
class PageStore {
 public:
  PageStore(std::shared_ptr<Driver> driver, std::size_t handle_bytes)
      : driver_(std::move(driver)), handle_bytes_(handle_bytes) {}
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;
  ~PageStore() { (void)trim(); }

  /// Fills `out`, recycled handles first, then new ones; answers how many are recycled. All or
  /// nothing: what was created before a failure is destroyed. Fails with kOutOfMemory. Blocks while
  /// the driver creates.
  Result<std::size_t> acquire(std::span<Handle> out);

  /// Takes back what acquire() gave and nobody used: the first `recycled` are recycled again, the
  /// others destroyed, so that a failed map leaves as many bytes held as there were.
  void give_up(std::span<const Handle> handles, std::size_t recycled);

  /// Takes handles back and keeps them for the next acquire.
  void recycle(std::span<const Handle> handles);

  /// Takes handles back and destroys them. Goes on past a failure: what could not be destroyed is
  /// kept as recycled, so its bytes stay counted; the first failure is the answer.
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
