// A driver around another driver that fails on demand, so that tests reach every error path.
#pragma once

#include <atomic>
#include <memory>

#include "driver/driver.h"

namespace kvelastic {

/// Counts the calls that can fail: create, destroy, map, set_access, unmap, copy and copy_host.
/// Calls `fail_at` (the first is 1) to `fail_at` + `fail_count` - 1 fail and do not reach the inner
/// driver. `fail_at` 0 never fails.
class FaultDriver final : public Driver {
 public:
  explicit FaultDriver(std::shared_ptr<Driver> inner) : inner_(std::move(inner)) {}

  /// Resets the counter and sets which calls fail.
  void arm(std::uint64_t fail_at, std::uint64_t fail_count);
  std::uint64_t calls() const { return calls_.load(); }

  std::size_t granularity_bytes() const override { return inner_->granularity_bytes(); }
  DeviceKind device() const override { return inner_->device(); }
  Result<std::byte*> reserve(std::size_t bytes) override { return inner_->reserve(bytes); }
  Status release(std::byte* address, std::size_t bytes) override {
    return inner_->release(address, bytes);
  }
  Result<Handle> create(std::size_t bytes) override;
  Status destroy(Handle handle, std::size_t bytes) override;
  Status map(std::byte* address, std::size_t bytes, Handle handle) override;
  Status set_access(std::byte* address, std::size_t bytes) override;
  Status unmap(std::byte* address, std::size_t bytes) override;
  Status copy(std::span<const CopyRun> runs) override;
  Status copy_host(std::span<const HostCopy> copies, CopyTo to) override;
  Status pin_host(std::span<std::byte> memory) override { return inner_->pin_host(memory); }
  void unpin_host(std::span<std::byte> memory) override { inner_->unpin_host(memory); }
  bool works_behind() const override { return inner_->works_behind(); }
  Result<std::unique_ptr<Fence>> fence() override { return inner_->fence(); }
  std::optional<DeviceMemory> memory() const override { return inner_->memory(); }
  void keep_free(std::uint64_t bytes) override { inner_->keep_free(bytes); }
  DriverStats stats() const override { return inner_->stats(); }

 private:
  bool fails();

  const std::shared_ptr<Driver> inner_;
  std::atomic<std::uint64_t> calls_{0}, first_{0}, count_{0};
};

}  // namespace kvelastic
