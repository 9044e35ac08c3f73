// A debugging driver around another driver: one scratch page is mapped where a range has no
// page. A kernel that reads out of bounds then reads scratch instead of ending its process.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "driver/driver.h"

namespace kvelastic {

/// All pages must have one size. Holds one extra page of that size from the first reserve() to the
/// last release(). Writes to unmapped addresses of any range go to that page.
///
///     address    p0       p1       p2       p3
///     reserve    scratch  scratch  scratch  scratch
///     map p1     scratch  page     scratch  scratch     unmap scratch, map
///     unmap p1   scratch  scratch  scratch  scratch     unmap, map scratch, set_access
///
/// Mapping and unmapping a page takes six driver calls instead of three, and reserve() maps scratch
/// once per page.
class GuardDriver final : public Driver {
 public:
  GuardDriver(std::shared_ptr<Driver> inner, std::size_t page_bytes)
      : inner_(std::move(inner)), page_bytes_(page_bytes) {}
  ~GuardDriver() override;

  std::size_t granularity_bytes() const override { return inner_->granularity_bytes(); }
  DeviceKind device() const override { return inner_->device(); }
  /// Post: scratch is mapped at every address of the range. Also fails as create(), map() and
  /// set_access(), and with kInvalidArgument if `bytes` are not whole pages.
  Result<std::byte*> reserve(std::size_t bytes) override;
  Status release(std::byte* address, std::size_t bytes) override;
  Result<Handle> create(std::size_t bytes) override { return inner_->create(bytes); }
  Status destroy(Handle handle, std::size_t bytes) override {
    return inner_->destroy(handle, bytes);
  }
  /// Pre: the page has the driver's page size. After a failure the scratch page is mapped again if
  /// possible.
  Status map(std::byte* address, std::size_t bytes, Handle handle) override;
  Status set_access(std::byte* address, std::size_t bytes) override {
    return inner_->set_access(address, bytes);
  }
  /// Succeeds even if scratch cannot be mapped again: the addresses then fault.
  Status unmap(std::byte* address, std::size_t bytes) override;
  bool works_behind() const override { return inner_->works_behind(); }
  Result<std::unique_ptr<Fence>> fence() override { return inner_->fence(); }
  Status copy(std::span<const CopyRun> runs) override { return inner_->copy(runs); }
  Status copy_host(std::span<const HostCopy> copies, CopyTo to) override {
    return inner_->copy_host(copies, to);
  }
  Status pin_host(std::span<std::byte> memory) override { return inner_->pin_host(memory); }
  void unpin_host(std::span<std::byte> memory) override { inner_->unpin_host(memory); }
  std::optional<DeviceMemory> memory() const override { return inner_->memory(); }
  void keep_free(std::uint64_t bytes) override { inner_->keep_free(bytes); }
  DriverStats stats() const override { return inner_->stats(); }

 private:
  Status keep_scratch();
  void drop_scratch();
  Status guard(std::byte* address, std::size_t bytes);
  Status unguard(std::byte* address, std::size_t bytes);
  void note(std::byte* address, std::size_t bytes, bool bare);
  std::size_t covered_run(std::byte* address, std::size_t bytes) const;

  const std::shared_ptr<Driver> inner_;
  const std::size_t page_bytes_;
  mutable std::mutex mutex_;  // a leaf lock, except while the scratch page is created or destroyed
  std::optional<Handle> scratch_;
  std::uint64_t ranges_ = 0;
  std::set<std::byte*> bare_;  // unmapped pages without scratch
};

}  // namespace kvelastic
