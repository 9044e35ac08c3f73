// A Driver on CUDA virtual memory management: whole pages of one GPU, mapped into this process.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/memory_pieces.h"
#include "base/own_process.h"
#include "driver/cuda_api.h"
#include "driver/driver.h"

namespace kvelastic {

/// Retains the device's primary context, which frameworks use too. Retries transient CUDA errors
/// (CUDA_ERROR_NOT_READY on a busy device). CUDA graphs may be captured at the same time in any
/// mode: calls use the thread's relaxed capture mode, and only events are queued in streams of
/// others. Only a process that maps pages needs this driver; a scheduler that uses a ring to its
/// workers does not.
class CudaDriver final : public Driver {
 public:
  /// `device` is "cuda", "cuda:1" (this process's numbering), "GPU-<uuid>" or "MIG-<uuid>". Fails
  /// with kDeviceUnavailable if the driver is missing or too old, there is no such device (the
  /// message lists the known ones) or it has no virtual memory management. Fails with
  /// kInvalidArgument for any other text.
  static Result<std::unique_ptr<CudaDriver>> open(const std::string& device);
  ~CudaDriver() override;

  std::size_t granularity_bytes() const override { return granularity_bytes_; }
  DeviceKind device() const override { return {DeviceKind::kCuda, ordinal_}; }
  Result<std::byte*> reserve(std::size_t bytes) override;
  Status release(std::byte* address, std::size_t bytes) override;
  Result<Handle> create(std::size_t bytes) override;
  Status destroy(Handle handle, std::size_t bytes) override;
  Status map(std::byte* address, std::size_t bytes, Handle handle) override;
  Status set_access(std::byte* address, std::size_t bytes) override;
  Status unmap(std::byte* address, std::size_t bytes) override;
  Status copy(std::span<const CopyRun> runs) override;
  /// One strided copy per HostCopy, queued together and waited for once. Concurrent calls overlap:
  /// the next piece is queued while one is copied, and each direction has a stream.
  Status copy_host(std::span<const HostCopy> copies, CopyTo to) override;
  Status pin_host(std::span<std::byte> memory) override;
  void unpin_host(std::span<std::byte> memory) override;
  bool works_behind() const override { return true; }
  Result<std::unique_ptr<Fence>> fence() override;
  std::optional<DeviceMemory> memory() const override;
  DriverStats stats() const override;

  /// Sets the streams whose work reads or writes pages; replaces the earlier list. Null means the
  /// legacy default stream. An empty list means that no kernel uses the pages. Before the first
  /// call, fence() fails with kStreamsUnknown. A stream must stay valid while it is listed and
  /// until the fences made in that time have passed. If a stream is being captured, its fence
  /// passes after the capture.
  void use_streams(std::vector<cuda::Stream> streams);
  /// True once use_streams() has been called.
  bool knows_streams() const;

  /// Exports a page as a file descriptor for another process to import; the caller closes it. Fails
  /// with kMapping if the device does not support that.
  Result<int> export_page(Handle handle);
  /// Imports a page of another process. `fd` stays the caller's. Release the page with destroy();
  /// its memory is free once every process has done so.
  Result<Handle> import_page(int fd);

  /// "GPU-..." or, for a MIG instance, "MIG-...", as nvidia-smi prints it.
  const std::string& uuid() const { return uuid_; }
  Result<std::size_t> total_bytes() const;
  /// Copies each piece to its counterpart of the same size, in order. Addresses may belong to any
  /// device or to the host. Blocks until the copy is complete; does not wait for other streams (see
  /// drain()). Fails with kInvalidArgument if sizes differ. If device memory is not mapped, it
  /// fails with the driver's error, and earlier pieces are copied.
  Status copy_pieces(std::span<const Piece> from, std::span<const Piece> to);

  /// Free bytes of the device now. Takes several microseconds: not for a hot path.
  Result<std::size_t> free_bytes() const;

 private:
  class InContext;
  class Marks;
  class Recorder;
  class StreamsFence;

  CudaDriver(const cuda::Api& api, cuda::Device device, int ordinal, cuda::Context context,
             std::string uuid, cuda::AllocationProperties properties);

  Status refuse_size(const char* call, std::size_t bytes) const;
  Error failed(const char* call, cuda::Result code, std::size_t bytes) const;
  /// Creates the driver's own streams. Done at open, because a stream needs device memory, and the
  /// device may be full when pages must be unmapped or written back.
  cuda::Result make_streams();
  /// Queues copies in `stream` and blocks until they are complete. `queue` returns a CUDA result.
  template <typename F>
  Status copy_and_wait(const char* call, cuda::Stream stream, F queue);
  /// Queues one strided copy, or one copy per row if the stride exceeds the maximum pitch.
  cuda::Result queue_rows(const cuda::Copy2D& rows, cuda::Stream stream) const;
  template <typename F>
  cuda::Result patiently(F call) const;

  const OwnProcess made_by_;
  const cuda::Api& api_;
  const cuda::Device device_;
  const int ordinal_;
  const cuda::Context context_;
  const std::string uuid_;
  const cuda::AllocationProperties properties_;
  std::size_t granularity_bytes_ = 0;  // set by open(), like max_pitch_bytes_
  std::size_t max_pitch_bytes_ = 0;    // largest row distance of a strided copy
  mutable std::mutex streams_mutex_;   // a leaf lock
  std::optional<std::vector<cuda::Stream>> streams_;
  // Waits for the legacy default stream and has no other work. An event in it replaces one in
  // the legacy stream, which must not be used while other streams capture.
  cuda::Stream behind_legacy_ = nullptr;
  std::unique_ptr<Recorder> recorder_;  // records fences; created by the first fence
  // For copies. They do not synchronise with other streams. A GPU copies in both directions at
  // once.
  cuda::Stream to_host_ = nullptr, to_device_ = nullptr, within_ = nullptr;
  std::atomic<std::uint64_t> creates_{0}, destroys_{0}, maps_{0}, unmaps_{0};
};

}  // namespace kvelastic
