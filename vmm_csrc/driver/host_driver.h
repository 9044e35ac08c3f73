// The machine's memory as a device: one memfd per driver, pages at offsets of it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/own_process.h"
#include "driver/driver.h"
#include "driver/host_memory.h"

namespace kvelastic {

/// Pages are 2 MiB huge pages if the kernel has them (MADV_COLLAPSE, Linux 6.1; needs neither a
/// privilege nor shmem_enabled), otherwise 4 KiB system pages, which are slower. Unmapped addresses
/// are PROT_NONE and fault.
///
/// The memfd has no name, so the kernel releases all memory when the process ends for any reason. A
/// forked child shares the memfd with its parent. create and destroy therefore fail there with
/// kDeviceUnavailable, and a child that destroys inherited objects does not affect its parent.
///
/// create fails with kOutOfMemory if the machine or a memory cgroup would be left with too little,
/// before the kernel would kill a process (host_memory.h).
class HostDriver final : public Driver {
 public:
  static constexpr std::size_t kGranularityBytes = std::size_t{2} << 20;

  /// Fails with kMapping if the kernel refuses a memfd.
  static Result<std::unique_ptr<HostDriver>> open();
  ~HostDriver() override;

  std::size_t granularity_bytes() const override { return kGranularityBytes; }
  Result<std::byte*> reserve(std::size_t bytes) override;
  Status release(std::byte* address, std::size_t bytes) override;
  Result<Handle> create(std::size_t bytes) override;
  Status destroy(Handle handle, std::size_t bytes) override;
  Status map(std::byte* address, std::size_t bytes, Handle handle) override;
  Status set_access(std::byte* address, std::size_t bytes) override;
  Status unmap(std::byte* address, std::size_t bytes) override;
  Status copy(std::span<const CopyRun> runs) override;
  Status copy_host(std::span<const HostCopy> copies, CopyTo to) override;
  void keep_free(std::uint64_t bytes) override { left_.keep_free(bytes); }
  DriverStats stats() const override;

 private:
  explicit HostDriver(int memfd);

  Result<std::uint64_t> take_offset(std::size_t bytes);
  void put_offset(std::uint64_t offset, std::size_t bytes);
  Status populate(std::uint64_t offset, std::size_t bytes);
  Status punch(std::uint64_t offset, std::size_t bytes);

  const int memfd_;
  const OwnProcess opened_by_;
  HostMemory left_;
  std::mutex offsets_mutex_;  // a leaf lock
  std::uint64_t end_offset_ = 0;
  std::unordered_map<std::size_t, std::vector<std::uint64_t>> free_offsets_;  // by page bytes
  std::atomic<std::uint64_t> creates_{0}, destroys_{0}, maps_{0}, unmaps_{0}, small_pages_{0};
};

}  // namespace kvelastic
