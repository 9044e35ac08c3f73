#include "driver/cuda_driver.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <system_error>
#include <thread>

#include "base/pauses.h"

namespace kvelastic {
namespace {

using Clock = std::chrono::steady_clock;

/// How long "not ready" is retried on a busy device before the call fails.
constexpr auto kPatience = std::chrono::seconds(10);

Error unavailable(const std::string& message) {
  return {Errc::kDeviceUnavailable, message};
}

constexpr const char* kGpuPrefix = "GPU-";
constexpr const char* kMigPrefix = "MIG-";

std::string text_of(const char* prefix, const cuda::Uuid& uuid) {
  std::string text = prefix;
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    std::array<char, 3> hex{};
    std::snprintf(hex.data(), hex.size(), "%02x", uuid.bytes[i]);
    text += hex.data();
  }
  return text;
}

struct Found {
  int ordinal;
  cuda::Device device;
  std::string uuid;
};

Result<std::vector<Found>> all_devices(const cuda::Api& api) {
  int count = 0;
  const cuda::Result counted = api.DeviceGetCount(&count);
  if (counted != cuda::kSuccess) return unavailable(api.describe("cuDeviceGetCount", counted));
  std::vector<Found> found;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cuda::Device device = 0;
    cuda::Uuid gpu{}, own{};
    if (api.DeviceGet(&device, ordinal) != cuda::kSuccess) continue;
    if (api.DeviceGetUuid(&gpu, device) != cuda::kSuccess) continue;
    if (api.DeviceGetInstanceUuid(&own, device) != cuda::kSuccess) continue;
    const bool is_whole = std::memcmp(gpu.bytes, own.bytes, sizeof(own.bytes)) == 0;
    found.push_back({ordinal, device, text_of(is_whole ? kGpuPrefix : kMigPrefix, own)});
  }
  return found;
}

/// Returns the ordinal of "cuda" or "cuda:N"; -1 for a UUID.
Result<int> ordinal_of(const std::string& name) {
  if (name == "cuda") return 0;
  if (name.starts_with(kGpuPrefix) || name.starts_with(kMigPrefix)) return -1;
  int ordinal = -1;
  if (name.starts_with("cuda:")) {
    const char* end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + 5, end, ordinal);
    if (error == std::errc() && stop == end && ordinal >= 0) return ordinal;
  }
  return Error{Errc::kInvalidArgument, "device \"" + name +
                                           "\" is not accepted; it must be cuda, cuda:N, "
                                           "GPU-<uuid> or MIG-<uuid>"};
}

Result<Found> find(const cuda::Api& api, const std::string& name) {
  Result<int> ordinal = ordinal_of(name);
  if (!ordinal) return ordinal.error();
  Result<std::vector<Found>> devices = all_devices(api);
  if (!devices) return devices.error();
  std::string known;
  for (const Found& each : *devices) {
    if (each.ordinal == *ordinal || each.uuid == name) return each;
    known += " cuda:" + std::to_string(each.ordinal) + " (" + each.uuid + ")";
  }
  return unavailable("there is no device " + name + " in this process; there " +
                     (known.empty() ? "is none (see CUDA_VISIBLE_DEVICES)" : "are:" + known));
}

bool has(const cuda::Api& api, cuda::Device device, int attribute) {
  int value = 0;
  return api.DeviceGetAttribute(&value, attribute, device) == cuda::kSuccess && value != 0;
}

cuda::Address address_of(const std::byte* at) {
  return reinterpret_cast<cuda::Address>(at);
}

/// While this object exists, CUDA calls of this thread neither fail because of a graph capture
/// elsewhere in the process nor invalidate it.
class BesideCaptures {
 public:
  explicit BesideCaptures(const cuda::Api& api)
      : api_(api), code_(api.ThreadExchangeStreamCaptureMode(&mode_)) {}
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;
  ~BesideCaptures() {
    if (code_ == cuda::kSuccess) (void)api_.ThreadExchangeStreamCaptureMode(&mode_);
  }
  cuda::Result code() const { return code_; }

 private:
  const cuda::Api& api_;
  int mode_ = cuda::kCaptureModeRelaxed;  // the thread's previous mode after the exchange
  const cuda::Result code_;
};

}  // namespace

/// Makes the driver's context current for the duration of a call. The caller may be any thread, for
/// example the ring's or the maintenance thread.
class CudaDriver::InContext {
 public:
  explicit InContext(const CudaDriver& driver) : api_(driver.api_), beside_captures_(driver.api_) {
    code_ = beside_captures_.code();
    if (code_ == cuda::kSuccess) code_ = api_.CtxPushCurrent(driver.context_);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  ~InContext() {
    cuda::Context popped = nullptr;
    if (code_ == cuda::kSuccess) (void)api_.CtxPopCurrent(&popped);
  }
  cuda::Result code() const { return code_; }

 private:
  const cuda::Api& api_;
  const BesideCaptures beside_captures_;
  cuda::Result code_;
};

/// An event in each stream. An event recorded during a capture would belong to the graph, so a
/// capturing stream gets its event after the capture has ended.
class CudaDriver::Marks {
 public:
  Marks(const CudaDriver& driver, std::vector<cuda::Stream> streams)
      : driver_(driver), unmarked_(std::move(streams)) {
    marked_.reserve(unmarked_.size());
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;
  ~Marks() {
    const InContext context(driver_);
    for (const Mark& mark : marked_) (void)driver_.api_.EventDestroy(mark.event);
  }

  /// Records an event in every stream that is not capturing. Blocks while a stream's queue is full.
  void record() {
    const InContext context(driver_);
    code_ = context.code();
    for (auto stream = unmarked_.begin(); code_ == cuda::kSuccess && stream != unmarked_.end();) {
      int capturing = cuda::kCaptureStatusNone;
      code_ = driver_.api_.StreamIsCapturing(*stream, &capturing);
      if (code_ == cuda::kSuccess && capturing != cuda::kCaptureStatusNone) {
        ++stream;
        continue;
      }
      if (code_ == cuda::kSuccess) code_ = record(*stream);
      stream = unmarked_.erase(stream);
    }
  }

  bool is_recorded() const { return unmarked_.empty(); }

  /// True if all events have passed. Never blocks.
  Result<bool> have_passed() {
    const InContext context(driver_);
    if (code_ == cuda::kSuccess) code_ = context.code();
    while (code_ == cuda::kSuccess && !marked_.empty()) {
      const Mark mark = marked_.back();
      const cuda::Result code = driver_.api_.EventQuery(mark.event);
      if (code == cuda::kErrorNotReady) return false;
      // A capture began between the check of the stream and the recording: the event belongs to the
      // graph.
      const bool was_captured = code == cuda::kErrorCapturedEvent;
      if (!was_captured && code != cuda::kSuccess) {
        code_ = code;
        break;
      }
      if (was_captured) unmarked_.push_back(mark.stream);
      (void)driver_.api_.EventDestroy(mark.event);
      marked_.pop_back();
    }
    if (code_ != cuda::kSuccess) return driver_.failed("waiting for a stream", code_, 0);
    return is_recorded();
  }

 private:
  struct Mark {
    cuda::Stream stream;
    cuda::Event event;
  };

  /// An event can only be recorded in a stream of the same context, and the stream's context may
  /// differ from ours.
  cuda::Result record(cuda::Stream stream) {
    cuda::Context own = nullptr, popped = nullptr;
    cuda::Result code = driver_.api_.StreamGetCtx(stream, &own);
    if (code == cuda::kSuccess) code = driver_.api_.CtxPushCurrent(own);
    if (code != cuda::kSuccess) return code;
    cuda::Event event = nullptr;
    code = driver_.api_.EventCreate(&event, cuda::kEventDisableTiming);
    if (code == cuda::kSuccess) {
      marked_.push_back({stream, event});
      code = driver_.api_.EventRecord(event, stream);
    }
    (void)driver_.api_.CtxPopCurrent(&popped);
    return code;
  }

  const CudaDriver& driver_;
  std::vector<cuda::Stream> unmarked_;
  std::vector<Mark> marked_;  // events that have passed are removed
  cuda::Result code_ = cuda::kSuccess;
};

/// A thread that records events. cuEventRecord blocks while the stream's queue is full, and a
/// thread that maps pages must not block.
class CudaDriver::Recorder {
 public:
  /// Marks to record, and whether they still have to be recorded.
  struct Order {
    explicit Order(std::unique_ptr<Marks> made) : marks(std::move(made)) {}
    std::unique_ptr<Marks> marks;
    std::atomic<bool> is_due{false};  // while true, only the recorder may use `marks`
  };

  Recorder() : thread_(&Recorder::run, this) {}
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  /// Waits for a recording in progress; drops pending orders.
  ~Recorder() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    came_.notify_one();
    thread_.join();
  }

  void record(const std::shared_ptr<Order>& order) {
    order->is_due.store(true, std::memory_order_relaxed);
    {
      const std::lock_guard lock(mutex_);
      orders_.push_back(order);
    }
    came_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      came_.wait(lock, [&] { return ended_ || !orders_.empty(); });
      if (ended_) return;
      std::shared_ptr<Order> order = std::move(orders_.front());
      orders_.pop_front();
      lock.unlock();
      order->marks->record();
      order->is_due.store(false, std::memory_order_release);
      order.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;  // a leaf lock
  std::condition_variable came_;
  std::deque<std::shared_ptr<Order>> orders_;
  bool ended_ = false;
  std::thread thread_;  // last: it uses the other members
};

class CudaDriver::StreamsFence final : public Fence {
 public:
  StreamsFence(const CudaDriver& driver, Recorder& recorder, std::vector<cuda::Stream> streams)
      : recorder_(recorder),
        order_(std::make_shared<Recorder::Order>(
            std::make_unique<Marks>(driver, std::move(streams)))) {
    recorder_.record(order_);
  }
  ~StreamsFence() override {
    if (!order_->is_due.load(std::memory_order_acquire)) order_->marks.reset();
  }

  Result<bool> has_passed() override {
    if (order_->is_due.load(std::memory_order_acquire)) return false;
    Result<bool> passed = order_->marks->have_passed();
    if (passed && !order_->marks->is_recorded()) recorder_.record(order_);
    return passed;
  }

 private:
  Recorder& recorder_;
  const std::shared_ptr<Recorder::Order> order_;
};

CudaDriver::CudaDriver(const cuda::Api& api, cuda::Device device, int ordinal,
                       cuda::Context context, std::string uuid,
                       cuda::AllocationProperties properties)
    : api_(api),
      device_(device),
      ordinal_(ordinal),
      context_(context),
      uuid_(std::move(uuid)),
      properties_(properties) {}

Result<std::unique_ptr<CudaDriver>> CudaDriver::open(const std::string& name) {
  if (Result<int> named = ordinal_of(name); !named) return named.error();
  Result<const cuda::Api*> loaded = cuda::load();
  if (!loaded) return loaded.error();
  const cuda::Api& api = **loaded;
  const BesideCaptures beside_captures(api);
  Result<Found> found = find(api, name);
  if (!found) return found.error();
  if (!has(api, found->device, cuda::kAttributeVmmSupported)) {
    return unavailable("device " + name +
                       " has no virtual memory management; it needs a GPU of "
                       "the Pascal generation or later, and not WSL");
  }
  cuda::AllocationProperties properties{};
  properties.type = cuda::kAllocationPinned;
  properties.location = {cuda::kLocationDevice, found->ordinal};
  properties.requested_handle_types =
      has(api, found->device, cuda::kAttributePosixFdSupported) ? cuda::kHandleTypePosixFd : 0;
  properties.flags.gpu_direct_rdma_capable =
      has(api, found->device, cuda::kAttributeRdmaWithVmmSupported) ? 1 : 0;
  cuda::Context context = nullptr;
  cuda::Result code = api.DevicePrimaryCtxRetain(&context, found->device);
  if (code != cuda::kSuccess) return unavailable(api.describe("cuDevicePrimaryCtxRetain", code));
  std::unique_ptr<CudaDriver> driver(
      new CudaDriver(api, found->device, found->ordinal, context, found->uuid, properties));
  code = driver->patiently([&] {
    return api.MemGetAllocationGranularity(&driver->granularity_bytes_, &properties,
                                           cuda::kGranularityMinimum);
  });
  if (code != cuda::kSuccess || driver->granularity_bytes_ == 0) {
    return unavailable(api.describe("cuMemGetAllocationGranularity", code));
  }
  code = driver->make_streams();
  if (code != cuda::kSuccess) return unavailable(api.describe("cuStreamCreate", code));
  int max_pitch = 0;  // unknown or unlimited: copy row by row
  (void)api.DeviceGetAttribute(&max_pitch, cuda::kAttributeMaxPitch, found->device);
  driver->max_pitch_bytes_ = static_cast<std::size_t>(std::max(max_pitch, 0));
  return driver;
}

CudaDriver::~CudaDriver() {
  // A forked child has no recorder thread, and destroying its condition variable there is
  // undefined.
  if (!made_by_.is_this()) (void)recorder_.release();
  recorder_.reset();
  {
    const InContext context(*this);
    for (const cuda::Stream own : {behind_legacy_, to_host_, to_device_, within_}) {
      if (own != nullptr) (void)api_.StreamDestroy(own);
    }
  }
  const BesideCaptures beside_captures(api_);
  (void)api_.DevicePrimaryCtxRelease(device_);
}

cuda::Result CudaDriver::make_streams() {
  const InContext context(*this);
  cuda::Result code = context.code();
  if (code == cuda::kSuccess) code = api_.StreamCreate(&behind_legacy_, cuda::kStreamDefault);
  for (cuda::Stream* copies : {&to_host_, &to_device_, &within_}) {
    if (code == cuda::kSuccess) code = api_.StreamCreate(copies, cuda::kStreamNonBlocking);
  }
  return code;
}

/// Calls in the driver's context and retries with backoff while the device returns "not ready".
template <typename F>
cuda::Result CudaDriver::patiently(F call) const {
  const InContext context(*this);
  if (context.code() != cuda::kSuccess) return context.code();
  const Clock::time_point deadline = Clock::now() + kPatience;
  Pauses pauses;
  for (;;) {
    const cuda::Result code = call();
    if (code != cuda::kErrorNotReady || Clock::now() >= deadline) return code;
    pauses.take();
  }
}

Status CudaDriver::refuse_size(const char* call, std::size_t bytes) const {
  if (bytes > 0 && bytes % granularity_bytes_ == 0) return ok();
  return Error{Errc::kInvalidArgument, std::string(call) + ": " + std::to_string(bytes) +
                                           " bytes is not a positive multiple of " +
                                           std::to_string(granularity_bytes_)};
}

Error CudaDriver::failed(const char* call, cuda::Result code, std::size_t bytes) const {
  const std::string what = api_.describe(call, code) + " for " + std::to_string(bytes) +
                           " bytes on cuda:" + std::to_string(ordinal_);
  if (code == cuda::kErrorOutOfMemory) {
    return {Errc::kOutOfMemory, what + "; lower the limits of the models on this device"};
  }
  return {Errc::kMapping, what};
}

Result<std::byte*> CudaDriver::reserve(std::size_t bytes) {
  if (Status sound = refuse_size("reserve", bytes); !sound) return sound.error();
  cuda::Address address = 0;
  const cuda::Result code =
      patiently([&] { return api_.MemAddressReserve(&address, bytes, granularity_bytes_, 0, 0); });
  if (code == cuda::kSuccess) return reinterpret_cast<std::byte*>(address);
  return Error{Errc::kMapping, failed("cuMemAddressReserve", code, bytes).message};
}

Status CudaDriver::release(std::byte* address, std::size_t bytes) {
  const cuda::Result code =
      patiently([&] { return api_.MemAddressFree(address_of(address), bytes); });
  return code == cuda::kSuccess ? ok() : Status(failed("cuMemAddressFree", code, bytes));
}

Result<Handle> CudaDriver::create(std::size_t bytes) {
  if (Status sound = refuse_size("create", bytes); !sound) return sound.error();
  cuda::AllocationHandle handle = 0;
  const cuda::Result code =
      patiently([&] { return api_.MemCreate(&handle, bytes, &properties_, 0); });
  if (code != cuda::kSuccess) return failed("cuMemCreate", code, bytes);
  creates_.fetch_add(1, std::memory_order_relaxed);
  return Handle{handle};
}

Status CudaDriver::destroy(Handle handle, std::size_t bytes) {
  const cuda::Result code = patiently([&] { return api_.MemRelease(handle); });
  if (code != cuda::kSuccess) return failed("cuMemRelease", code, bytes);
  destroys_.fetch_add(1, std::memory_order_relaxed);
  return ok();
}

Status CudaDriver::map(std::byte* address, std::size_t bytes, Handle handle) {
  constexpr std::size_t kFromItsStart = 0;  // cuda.h: "currently must be zero"
  const cuda::Result code =
      patiently([&] { return api_.MemMap(address_of(address), bytes, kFromItsStart, handle, 0); });
  if (code != cuda::kSuccess) return failed("cuMemMap", code, bytes);
  maps_.fetch_add(1, std::memory_order_relaxed);
  return ok();
}

Status CudaDriver::set_access(std::byte* address, std::size_t bytes) {
  const cuda::AccessDescriptor access{properties_.location, cuda::kAccessReadWrite};
  const cuda::Result code =
      patiently([&] { return api_.MemSetAccess(address_of(address), bytes, &access, 1); });
  return code == cuda::kSuccess ? ok() : Status(failed("cuMemSetAccess", code, bytes));
}

Status CudaDriver::unmap(std::byte* address, std::size_t bytes) {
  const cuda::Result code = patiently([&] { return api_.MemUnmap(address_of(address), bytes); });
  if (code != cuda::kSuccess) return failed("cuMemUnmap", code, bytes);
  unmaps_.fetch_add(1, std::memory_order_relaxed);
  return ok();
}

Result<std::unique_ptr<Fence>> CudaDriver::fence() {
  const std::lock_guard lock(streams_mutex_);
  if (!streams_) {
    return Error{
        Errc::kStreamsUnknown,
        "pages of cuda:" + std::to_string(ordinal_) +
            " may be in use by kernels of any stream, so none is unmapped; say first which "
            "streams use them (use_streams), none if no kernel does"};
  }
  if (streams_->empty()) return std::unique_ptr<Fence>();
  std::vector<cuda::Stream> streams = *streams_;
  for (cuda::Stream& each : streams) {
    if (cuda::is_legacy(each)) each = behind_legacy_;
  }
  if (!recorder_) {
    try {
      recorder_ = std::make_unique<Recorder>();
    } catch (const std::system_error& error) {
      return Error{Errc::kMapping,
                   "no thread could be started to wait for kernels that use pages of cuda:" +
                       std::to_string(ordinal_) + ": " + error.what() +
                       "; raise the limit on threads of this user or container"};
    }
  }
  return std::unique_ptr<Fence>(
      std::make_unique<StreamsFence>(*this, *recorder_, std::move(streams)));
}

void CudaDriver::use_streams(std::vector<cuda::Stream> streams) {
  const std::lock_guard lock(streams_mutex_);
  streams_ = std::move(streams);
}

bool CudaDriver::knows_streams() const {
  const std::lock_guard lock(streams_mutex_);
  return streams_.has_value();
}

template <typename F>
Status CudaDriver::copy_and_wait(const char* call, cuda::Stream stream, F queue) {
  const InContext context(*this);
  if (context.code() != cuda::kSuccess) return failed(call, context.code(), 0);
  const cuda::Result code = queue(stream);
  // Also after a failure: what was given to the stream must not run on when this has returned.
  Marks queued(*this, {stream});
  queued.record();
  for (PausesAfterSpin pauses(Clock::now());; pauses.take()) {
    const Result<bool> passed = queued.have_passed();
    if (!passed && code == cuda::kSuccess) return passed.error();
    if (!passed || *passed) break;
  }
  return code == cuda::kSuccess ? ok() : Status(failed(call, code, 0));
}

cuda::Result CudaDriver::queue_rows(const cuda::Copy2D& rows, cuda::Stream stream) const {
  if (std::max(rows.from.pitch_bytes, rows.to.pitch_bytes) <= max_pitch_bytes_) {
    return api_.Memcpy2DAsync(&rows, stream);
  }
  const auto begin = [](const cuda::Copy2D::End& end, std::size_t row) {
    const auto address = end.memory_type == cuda::kMemoryTypeHost
                             ? reinterpret_cast<cuda::Address>(end.host)
                             : end.device;
    return address + row * end.pitch_bytes;
  };
  for (std::size_t row = 0; row < rows.height; ++row) {
    const cuda::Result code =
        api_.MemcpyAsync(begin(rows.to, row), begin(rows.from, row), rows.width_bytes, stream);
    if (code != cuda::kSuccess) return code;
  }
  return cuda::kSuccess;
}

Status CudaDriver::copy(std::span<const CopyRun> runs) {
  return copy_and_wait("copying within the device", within_, [&](cuda::Stream stream) {
    for (const CopyRun& run : runs) {
      cuda::Copy2D rows{};
      rows.width_bytes = run.row_bytes;
      rows.height = run.rows;
      for (cuda::Copy2D::End* end : {&rows.from, &rows.to}) {
        end->memory_type = cuda::kMemoryTypeDevice;
        end->pitch_bytes = run.stride_bytes;
      }
      rows.from.device = address_of(run.from);
      rows.to.device = address_of(run.to);
      const cuda::Result code = queue_rows(rows, stream);
      if (code != cuda::kSuccess) return code;
    }
    return cuda::kSuccess;
  });
}

Status CudaDriver::copy_host(std::span<const HostCopy> copies, CopyTo to) {
  const cuda::Stream way = to == CopyTo::kHost ? to_host_ : to_device_;
  return copy_and_wait("copying to or from the host", way, [&](cuda::Stream stream) {
    for (const HostCopy& copy : copies) {
      cuda::Copy2D rows{};
      rows.width_bytes = copy.row_bytes;
      rows.height = copy.rows;
      cuda::Copy2D::End& device = to == CopyTo::kHost ? rows.from : rows.to;
      device.memory_type = cuda::kMemoryTypeDevice;
      device.device = address_of(copy.device);
      device.pitch_bytes = copy.stride_bytes;
      cuda::Copy2D::End& host = to == CopyTo::kHost ? rows.to : rows.from;
      host.memory_type = cuda::kMemoryTypeHost;
      host.host = copy.host;
      host.pitch_bytes = copy.row_bytes;
      const cuda::Result code = queue_rows(rows, stream);
      if (code != cuda::kSuccess) return code;
    }
    return cuda::kSuccess;
  });
}

Status CudaDriver::copy_pieces(std::span<const Piece> from, std::span<const Piece> to) {
  const auto same_size = [](const Piece& a, const Piece& b) { return a.bytes == b.bytes; };
  if (!std::ranges::equal(from, to, same_size)) {
    return Error{Errc::kInvalidArgument, "each piece is copied to one of the same size"};
  }
  return copy_and_wait("cuMemcpyAsync", within_, [&](cuda::Stream stream) {
    for (std::size_t i = 0; i < from.size(); ++i) {
      const cuda::Result code =
          api_.MemcpyAsync(to[i].address, from[i].address, from[i].bytes, stream);
      if (code != cuda::kSuccess) return code;
    }
    return cuda::kSuccess;
  });
}

Status CudaDriver::pin_host(std::span<std::byte> memory) {
  const InContext context(*this);
  cuda::Result code = context.code();
  if (code == cuda::kSuccess) {
    code = api_.MemHostRegister(memory.data(), memory.size(), cuda::kHostRegisterPortable);
  }
  return code == cuda::kSuccess ? ok() : Status(failed("cuMemHostRegister", code, memory.size()));
}

void CudaDriver::unpin_host(std::span<std::byte> memory) {
  const InContext context(*this);
  if (context.code() == cuda::kSuccess) (void)api_.MemHostUnregister(memory.data());
}

Result<int> CudaDriver::export_page(Handle handle) {
  int fd = -1;
  const cuda::Result code = patiently(
      [&] { return api_.MemExportToShareableHandle(&fd, handle, cuda::kHandleTypePosixFd, 0); });
  if (code != cuda::kSuccess) return failed("cuMemExportToShareableHandle", code, 0);
  return fd;
}

Result<Handle> CudaDriver::import_page(int fd) {
  cuda::AllocationHandle handle = 0;
  // The driver wants the descriptor itself in the place of the pointer.
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  const cuda::Result code = patiently([&] {
    return api_.MemImportFromShareableHandle(&handle, shareable, cuda::kHandleTypePosixFd);
  });
  if (code != cuda::kSuccess) return failed("cuMemImportFromShareableHandle", code, 0);
  return Handle{handle};
}

Result<std::size_t> CudaDriver::total_bytes() const {
  const BesideCaptures beside_captures(api_);
  std::size_t bytes = 0;
  const cuda::Result code = api_.DeviceTotalMem(&bytes, device_);
  if (code != cuda::kSuccess) return failed("cuDeviceTotalMem", code, 0);
  return bytes;
}

Result<std::size_t> CudaDriver::free_bytes() const {
  std::size_t free = 0, total = 0;
  const cuda::Result code = patiently([&] { return api_.MemGetInfo(&free, &total); });
  if (code != cuda::kSuccess) return failed("cuMemGetInfo", code, 0);
  return free;
}

std::optional<DeviceMemory> CudaDriver::memory() const {
  // Both from one call: cuDeviceTotalMem may count memory that cuMemGetInfo does not, and the
  // ledger would take it for used.
  std::size_t free = 0, total = 0;
  const cuda::Result code = patiently([&] { return api_.MemGetInfo(&free, &total); });
  if (code != cuda::kSuccess) return std::nullopt;
  return DeviceMemory{total, free};
}

DriverStats CudaDriver::stats() const {
  return {creates_.load(), destroys_.load(), maps_.load(), unmaps_.load(), 0};
}

}  // namespace kvelastic
