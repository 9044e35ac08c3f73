// CUDA virtual memory as a driver: whole pages of one GPU, mapped into addresses of this process.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/own_process.h"
#include "base/pieces.h"
#include "driver/cuda_api.h"
#include "driver/driver.h"

namespace kvelastic {

/// Uses the device's primary context, the one that frameworks use, and keeps it alive. Answers of
/// CUDA that pass by themselves (CUDA_ERROR_NOT_READY on a busy device) are waited out. CUDA graphs
/// may be captured meanwhile, in whichever mode: calls are made in the thread's relaxed capture
/// mode, and nothing is queued in a stream of others but events. Only a process that maps pages
/// needs one: a scheduler that talks to its workers through a ring does not.
class CudaDriver final : public Driver {
 public:
  /// `device` is "cuda", "cuda:1" (the process's own numbering), "GPU-<uuid>" or "MIG-<uuid>".
  /// Fails with kDeviceUnavailable: no driver or too old, no such device (the known ones are
  /// named), no virtual memory management on it; with kInvalidArgument for another text.
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
  /// One strided copy for each, queued together and waited for once.
  Status copy_host(std::span<const HostCopy> copies, CopyTo to) override;
  Status pin_host(std::span<std::byte> memory) override;
  void unpin_host(std::span<std::byte> memory) override;
  bool works_behind() const override { return true; }
  Result<std::unique_ptr<Fence>> fence() override;
  std::optional<DeviceMemory> memory() const override;
  DriverStats stats() const override;

  /// The streams whose work reads or writes the pages, instead of those named before; null is the
  /// legacy default stream, and none says that no kernel uses them. Before the first call, fence()
  /// fails with kStreamsUnknown. A stream must live as long as it is named, and until the fences of
  /// that time have passed. The fence of one that is being captured passes after the capture.
  void use_streams(std::vector<cuda::Stream> streams);
  /// Whether use_streams() has been called.
  bool knows_streams() const;

  /// A page as a file descriptor that another process may import; the caller closes it.
  /// Fails with kMapping where the device cannot.
  Result<int> export_page(Handle handle);
  /// A page of another process, by its descriptor (which stays the caller's). To be given back by
  /// destroy(): the memory is free once every process has.
  Result<Handle> import_page(int fd);

  /// "GPU-..." or, of a MIG instance, "MIG-...": as nvidia-smi writes it.
  const std::string& uuid() const { return uuid_; }
  Result<std::size_t> total_bytes() const;
  /// Copies pieces, each to its counterpart of the same size, in order; an address may be of any
  /// device's memory or of the host's. All of it is there when this returns. It waits for no other
  /// stream (drain() does). Fails with kInvalidArgument (other sizes), and as the driver does where
  /// memory of a device is not mapped: what comes before that in the order is copied then.
  Status copy_pieces(std::span<const Piece> from, std::span<const Piece> to);

  /// What nobody holds on the device right now. Some microseconds: not for a hot path.
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
  /// The driver's own streams. Made when it is opened: a stream takes memory of the device, which
  /// is full where pages are to be unmapped or written back.
  cuda::Result make_streams();
  /// Queues copies in the stream for them, and waits until they are done. `queue` answers a code.
  template <typename F>
  Status copy_and_wait(const char* call, F queue);
  /// Queues one strided copy, or one for each row where they lie further apart than it takes.
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
  std::size_t granularity_bytes_ = 0;  // asked for once, by open(), as is the next
  std::size_t max_pitch_bytes_ = 0;    // of the rows of a strided copy
  mutable std::mutex streams_mutex_;   // a leaf lock
  std::optional<std::vector<cuda::Stream>> streams_;
  // Waits for the legacy default stream, and has no work of its own: an event in it stands for one
  // in that stream, which must not be touched while others capture.
  cuda::Stream behind_legacy_ = nullptr;
  std::unique_ptr<Recorder> recorder_;  // of fences; made by the first one
  std::mutex copy_mutex_;  // one batch of copies at a time; streams_mutex_ is not taken under it
  cuda::Stream copy_stream_ = nullptr;  // waits for nobody's work
  std::atomic<std::uint64_t> creates_{0}, destroys_{0}, maps_{0}, unmaps_{0};
};

}  // namespace kvelastic
