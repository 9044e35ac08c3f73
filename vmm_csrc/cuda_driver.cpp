#include "cuda_driver.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "pauses.h"

namespace kvelastic {
namespace {

using Clock = std::chrono::steady_clock;

/// How long a busy device may answer "not ready" before that is a failure.
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

/// The ordinal that "cuda" or "cuda:N" means; -1 for a UUID, which is looked up.
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

/// While it lives, calls of this thread neither fail for a capture of a CUDA graph that goes on in
/// this process nor end it.
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
  int mode_ = cuda::kCaptureModeRelaxed;  // the thread's own from then on
  const cuda::Result code_;
};

}  // namespace

/// Makes the driver's context the thread's own for the length of a call: the caller may be any
/// thread, the ring's or the keeper's among them.
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

/// An event in each stream. What is recorded in a stream that is being captured belongs to the
/// graph, so such a stream gets its event when the capture has ended.
class CudaDriver::StreamsFence final : public Fence {
 public:
  StreamsFence(const CudaDriver& driver, std::vector<cuda::Stream> streams)
      : driver_(driver), unmarked_(std::move(streams)) {
    events_.reserve(unmarked_.size());
  }
  ~StreamsFence() override {
    const InContext context(driver_);
    for (const cuda::Event event : events_) (void)driver_.api_.EventDestroy(event);
  }

  /// Pre: the context is current.
  cuda::Result mark() {
    for (auto stream = unmarked_.begin(); stream != unmarked_.end();) {
      int capturing = cuda::kCaptureStatusNone;
      cuda::Result code = driver_.api_.StreamIsCapturing(*stream, &capturing);
      if (code == cuda::kSuccess && capturing != cuda::kCaptureStatusNone) {
        ++stream;
        continue;
      }
      cuda::Event event = nullptr;
      if (code == cuda::kSuccess) {
        code = driver_.api_.EventCreate(&event, cuda::kEventDisableTiming);
      }
      if (code != cuda::kSuccess) return code;
      events_.push_back(event);
      if (code = driver_.api_.EventRecord(event, *stream); code != cuda::kSuccess) return code;
      stream = unmarked_.erase(stream);
    }
    return cuda::kSuccess;
  }

  Result<bool> has_passed() override {
    const InContext context(driver_);
    cuda::Result code = context.code();
    if (code == cuda::kSuccess) code = mark();
    for (; code == cuda::kSuccess && !events_.empty(); events_.pop_back()) {
      code = driver_.api_.EventQuery(events_.back());
      if (code != cuda::kSuccess) break;
      (void)driver_.api_.EventDestroy(events_.back());
    }
    if (code == cuda::kErrorNotReady) return false;
    if (code != cuda::kSuccess) return driver_.failed("waiting for a stream", code, 0);
    return unmarked_.empty();
  }

 private:
  const CudaDriver& driver_;
  std::vector<cuda::Stream> unmarked_;
  std::vector<cuda::Event> events_;  // those that have passed are gone
};

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
  if (code == cuda::kSuccess && driver->granularity_bytes_ > 0) return driver;
  return unavailable(api.describe("cuMemGetAllocationGranularity", code));
}

CudaDriver::~CudaDriver() {
  {
    const InContext context(*this);
    for (const cuda::Stream own : {behind_legacy_, copy_stream_}) {
      if (own != nullptr) (void)api_.StreamDestroy(own);
    }
  }
  const BesideCaptures beside_captures(api_);
  (void)api_.DevicePrimaryCtxRelease(device_);
}

/// Calls in the context, again and again while the device says that it is not ready.
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

cuda::Result CudaDriver::make_stream(cuda::Stream& stream, unsigned flags) {
  return stream != nullptr ? cuda::kSuccess : api_.StreamCreate(&stream, flags);
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
  const InContext context(*this);
  cuda::Result code = context.code();
  for (cuda::Stream& each : streams) {
    if (!cuda::is_legacy(each) || code != cuda::kSuccess) continue;
    code = make_stream(behind_legacy_, cuda::kStreamDefault);
    each = behind_legacy_;
  }
  auto fence = std::make_unique<StreamsFence>(*this, std::move(streams));
  if (code == cuda::kSuccess) code = fence->mark();
  if (code != cuda::kSuccess) return failed("marking the work of a stream", code, 0);
  return std::unique_ptr<Fence>(std::move(fence));
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
Status CudaDriver::copy_and_wait(const char* call, F queue) {
  const std::lock_guard lock(copy_mutex_);
  const InContext context(*this);
  cuda::Result code = context.code();
  if (code == cuda::kSuccess) code = make_stream(copy_stream_, cuda::kStreamNonBlocking);
  if (code != cuda::kSuccess) return failed("making a stream for copies", code, 0);
  code = queue(copy_stream_);
  // Also after a failure: what was given to the stream must not run on when this has returned.
  StreamsFence finished(*this, {copy_stream_});
  const cuda::Result marked = finished.mark();
  for (PausesAfterSpin pauses(Clock::now()); marked == cuda::kSuccess; pauses.take()) {
    const Result<bool> passed = finished.has_passed();
    if (!passed) return passed.error();
    if (*passed) break;
  }
  if (code == cuda::kSuccess) code = marked;
  return code == cuda::kSuccess ? ok() : Status(failed(call, code, 0));
}

Status CudaDriver::copy(std::span<const CopyRun> runs) {
  return copy_and_wait("cuMemcpy2DAsync", [&](cuda::Stream stream) {
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
      const cuda::Result code = api_.Memcpy2DAsync(&rows, stream);
      if (code != cuda::kSuccess) return code;
    }
    return cuda::kSuccess;
  });
}

Status CudaDriver::copy_host(std::span<const HostCopy> copies, CopyTo to) {
  return copy_and_wait("cuMemcpy2DAsync", [&](cuda::Stream stream) {
    for (const HostCopy& copy : copies) {
      cuda::Copy2D run{};
      run.width_bytes = copy.row_bytes;
      run.height = copy.rows;
      cuda::Copy2D::End& device = to == CopyTo::kHost ? run.from : run.to;
      device.memory_type = cuda::kMemoryTypeDevice;
      device.device = address_of(copy.device);
      device.pitch_bytes = copy.stride_bytes;
      cuda::Copy2D::End& host = to == CopyTo::kHost ? run.to : run.from;
      host.memory_type = cuda::kMemoryTypeHost;
      host.host = copy.host;
      host.pitch_bytes = copy.row_bytes;
      const cuda::Result code = api_.Memcpy2DAsync(&run, stream);
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
  const Result<std::size_t> total = total_bytes();
  const Result<std::size_t> free = free_bytes();
  if (!total || !free) return std::nullopt;
  return DeviceMemory{*total, *free};
}

DriverStats CudaDriver::stats() const {
  return {creates_.load(), destroys_.load(), maps_.load(), unmaps_.load(), 0};
}

}  // namespace kvelastic
