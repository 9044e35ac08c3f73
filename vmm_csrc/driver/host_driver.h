// The machine's own memory as a device: one memfd a driver, pages at offsets of it.
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

/// Pages are 2 MiB huge pages where the kernel has them to give (MADV_COLLAPSE, Linux 6.1, needs no
/// privilege and no shmem_enabled setting), else 4 KiB system pages: the same meaning, slower.
/// Unmapped addresses are PROT_NONE and fault. The kernel takes everything back when the process
/// dies, however it dies: the memfd has no name. A forked child shares the memfd with its parent,
/// so there create and destroy fail with kDeviceUnavailable: a child that lets go of what it has
/// inherited takes nothing from its parent.
/// A page that would leave the machine, or a memory cgroup, with too little is refused with
/// kOutOfMemory before the kernel would kill for it (host_memory.h).
class HostDriver final : public Driver {
 public:
  static constexpr std::size_t kGranularityBytes = std::size_t{2} << 20;

  /// Fails with kMapping when the kernel has no memfd to give.
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
  std::mutex offsets_mutex_;  // a leaf lock: nothing else is taken under it
  std::uint64_t end_offset_ = 0;
  std::unordered_map<std::size_t, std::vector<std::uint64_t>> free_offsets_;  // by page bytes
  std::atomic<std::uint64_t> creates_{0}, destroys_{0}, maps_{0}, unmaps_{0}, small_pages_{0};
};

}  // namespace kvelastic
