// Contexts, by their driver names.
#include "api.h"
#include "call.h"
#include "context.h"
#include "streams.h"
#include "visible_devices.h"

using namespace kvsim;

namespace {

Context* from(CUcontext handle) {
  return reinterpret_cast<Context*>(handle);
}
CUcontext to(Context* context) {
  return reinterpret_cast<CUcontext>(context);
}

/// cuCtxSetCurrent and cuCtxPushCurrent take a living context only.
CUresult check(CUcontext handle) {
  if (!is_context(from(handle))) return CUDA_ERROR_INVALID_CONTEXT;
  return from(handle)->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult create(Function function, CUcontext* handle, unsigned flags, CUdevice device) {
  return call(function, Needs::kInit, [&] {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Context* context = nullptr;
    const CUresult result = create_context(device, flags, &context);
    if (result == CUDA_SUCCESS) *handle = to(context);
    return result;
  });
}

}  // namespace

KVSIM_API CUresult cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice device) {
  return call(Function::cuDevicePrimaryCtxRetain, Needs::kInit, [&] {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Context* context = nullptr;
    const CUresult result = retain_primary(device, &context);
    if (result == CUDA_SUCCESS) *handle = to(context);
    return result;
  });
}

KVSIM_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return call(Function::cuDevicePrimaryCtxRelease_v2, Needs::kInit, [&] {
    return is_device(device) ? release_primary(device) : CUDA_ERROR_INVALID_DEVICE;
  });
}

KVSIM_API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  return call(Function::cuDevicePrimaryCtxReset_v2, Needs::kInit, [&] {
    return is_device(device) ? reset_primary(device) : CUDA_ERROR_INVALID_DEVICE;
  });
}

KVSIM_API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  return call(Function::cuDevicePrimaryCtxSetFlags_v2, Needs::kInit, [&] {
    return is_device(device) ? set_primary_flags(device, flags) : CUDA_ERROR_INVALID_DEVICE;
  });
}

KVSIM_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return call(Function::cuDevicePrimaryCtxGetState, Needs::kInit, [&] {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
    primary_state(device, flags, active);
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuCtxCreate_v2(CUcontext* handle, unsigned flags, CUdevice device) {
  return create(Function::cuCtxCreate_v2, handle, flags, device);
}

KVSIM_API CUresult cuCtxCreate_v4(CUcontext* handle, void*, unsigned flags, CUdevice device) {
  return create(Function::cuCtxCreate_v4, handle, flags, device);
}

KVSIM_API CUresult cuCtxDestroy_v2(CUcontext handle) {
  return call(Function::cuCtxDestroy_v2, Needs::kInit, [&] {
    return is_context(from(handle)) ? destroy_context(from(handle)) : CUDA_ERROR_INVALID_CONTEXT;
  });
}

KVSIM_API CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  return call(Function::cuCtxPushCurrent_v2, Needs::kInit, [&] {
    const CUresult result = check(handle);
    return result == CUDA_SUCCESS ? push_current(from(handle)) : result;
  });
}

KVSIM_API CUresult cuCtxPopCurrent_v2(CUcontext* handle) {
  return call(Function::cuCtxPopCurrent_v2, Needs::kInit, [&] {
    Context* context = nullptr;
    const CUresult result = pop_current(&context);
    if (result == CUDA_SUCCESS && handle != nullptr) *handle = to(context);
    return result;
  });
}

KVSIM_API CUresult cuCtxSetCurrent(CUcontext handle) {
  return call(Function::cuCtxSetCurrent, Needs::kInit, [&] {
    if (handle != nullptr) {
      if (const CUresult result = check(handle); result != CUDA_SUCCESS) return result;
    }
    set_current(from(handle));
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuCtxGetCurrent(CUcontext* handle) {
  return call(Function::cuCtxGetCurrent, Needs::kInit, [&] {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *handle = to(current_context());
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuCtxGetDevice(CUdevice* device) {
  return call(Function::cuCtxGetDevice, Needs::kContext, [&] {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *device = current_context()->device;
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuCtxGetFlags(unsigned* flags) {
  return call(Function::cuCtxGetFlags, Needs::kContext, [&] {
    if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = current_context()->flags;
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
  return call(Function::cuCtxGetId, Needs::kInit, [&] {
    Context* context = handle == nullptr ? current_context() : from(handle);
    if (context == nullptr || !is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *id = context->id;
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuCtxGetApiVersion(CUcontext handle, unsigned* version) {
  return call(Function::cuCtxGetApiVersion, Needs::kInit, [&] {
    Context* context = handle == nullptr ? current_context() : from(handle);
    if (context == nullptr || !is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = 3020;  // the form of contexts since CUDA 3.2
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return call(Function::cuCtxGetStreamPriorityRange, Needs::kContext, [&] {
    if (least != nullptr) *least = kLowestPriority;
    if (greatest != nullptr) *greatest = kHighestPriority;
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuCtxSynchronize() {
  return call(Function::cuCtxSynchronize, Needs::kContext, [] { return synchronize_context(); });
}
