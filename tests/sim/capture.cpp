#include "capture.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace kvsim {
namespace {

struct Capture {
  std::uintptr_t stream;
  const Context* context;
  bool blocking;
  CUstreamCaptureMode mode;
  std::thread::id by;
  bool lost = false;
};

/// Open captures of the process, under a leaf lock; never destroyed.
struct Captures {
  std::mutex mutex;
  std::vector<Capture> open;
  std::atomic<std::size_t> count{0};  // without any, no call looks further
};

Captures& all() {
  static auto* const captures = new Captures;
  return *captures;
}

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

Capture* find(std::uintptr_t stream) {
  const auto found = std::find_if(all().open.begin(), all().open.end(),
                                  [&](const Capture& each) { return each.stream == stream; });
  return found == all().open.end() ? nullptr : &*found;
}

/// Calls that are fine beside a capture: they neither wait for the device nor change its memory.
/// CUDA names few unsafe ones; here all others are, which is the stricter reading.
bool is_safe(Function function) {
  switch (function) {
    case Function::cuThreadExchangeStreamCaptureMode:
    case Function::cuStreamBeginCapture_v2:
    case Function::cuStreamEndCapture:
    case Function::cuStreamIsCapturing:
    case Function::cuGraphDestroy:
    case Function::cuInit:
    case Function::cuDeviceGet:
    case Function::cuDeviceGetCount:
    case Function::cuDeviceGetName:
    case Function::cuDeviceGetUuid:
    case Function::cuDeviceGetUuid_v2:
    case Function::cuDeviceGetAttribute:
    case Function::cuDeviceGetPCIBusId:
    case Function::cuDeviceGetByPCIBusId:
    case Function::cuCtxPushCurrent_v2:
    case Function::cuCtxPopCurrent_v2:
    case Function::cuCtxSetCurrent:
    case Function::cuCtxGetCurrent:
    case Function::cuCtxGetDevice:
    case Function::cuCtxGetFlags:
    case Function::cuCtxGetId:
    case Function::cuCtxGetApiVersion:
    case Function::cuCtxGetStreamPriorityRange:
    case Function::cuMemcpyAsync:
    case Function::cuMemcpyHtoDAsync_v2:
    case Function::cuMemcpyDtoHAsync_v2:
    case Function::cuMemcpyDtoDAsync_v2:
    case Function::cuMemcpy2DAsync_v2:
    case Function::cuMemsetD8Async:
    case Function::cuMemsetD32Async:
    case Function::cuStreamWaitEvent:
    case Function::cuStreamGetFlags:
    case Function::cuStreamGetPriority:
    case Function::cuStreamGetCtx:
    case Function::cuStreamGetId:
    case Function::cuLaunchHostFunc:
    case Function::cuEventCreate:
    case Function::cuEventDestroy_v2:
    case Function::cuEventRecord:
    case Function::cuEventRecordWithFlags:
      return true;
    default:
      return false;
  }
}

}  // namespace

CUresult exchange_capture_mode(CUstreamCaptureMode* mode) {
  if (mode == nullptr || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL ||
      *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::swap(thread_mode, *mode);
  return CUDA_SUCCESS;
}

CUresult check_captures(Function function) {
  if (all().count.load() == 0 || is_safe(function)) return CUDA_SUCCESS;
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  const std::lock_guard lock(all().mutex);
  CUresult result = CUDA_SUCCESS;
  for (Capture& capture : all().open) {
    const bool own =
        capture.by == std::this_thread::get_id() && capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool global = thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                        capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!own && !global) continue;
    capture.lost = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult open_capture(std::uintptr_t stream, const Context* context, bool blocking,
                      CUstreamCaptureMode mode) {
  if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::lock_guard lock(all().mutex);
  if (find(stream) != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  all().open.push_back({stream, context, blocking, mode, std::this_thread::get_id()});
  all().count = all().open.size();
  return CUDA_SUCCESS;
}

CUresult close_capture(std::uintptr_t stream) {
  const std::lock_guard lock(all().mutex);
  const Capture* capture = find(stream);
  if (capture == nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
      capture->by != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  const bool lost = capture->lost;
  std::erase_if(all().open, [&](const Capture& each) { return each.stream == stream; });
  all().count = all().open.size();
  return lost ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

bool is_captured(std::uintptr_t stream) {
  if (all().count.load() == 0) return false;
  const std::lock_guard lock(all().mutex);
  return find(stream) != nullptr;
}

bool is_capture_lost(std::uintptr_t stream) {
  const std::lock_guard lock(all().mutex);
  const Capture* capture = find(stream);
  return capture != nullptr && capture->lost;
}

void lose_capture(std::uintptr_t stream) {
  const std::lock_guard lock(all().mutex);
  if (Capture* capture = find(stream)) capture->lost = true;
}

void drop_captures_of(const Context* context) {
  const std::lock_guard lock(all().mutex);
  std::erase_if(all().open, [&](const Capture& each) { return each.context == context; });
  all().count = all().open.size();
}

CUresult check_legacy(const Context* context) {
  if (all().count.load() == 0) return CUDA_SUCCESS;
  const std::lock_guard lock(all().mutex);
  CUresult result = CUDA_SUCCESS;
  for (Capture& capture : all().open) {
    if (capture.context != context || !capture.blocking) continue;
    capture.lost = true;
    result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return result;
}

}  // namespace kvsim
