// Streams and events, by their driver names. What they do is in streams.cpp.
#include "api.h"
#include "call.h"
#include "streams.h"

using namespace kvsim;

KVSIM_API CUresult cuStreamCreate(CUstream* handle, unsigned flags) {
  return call(Function::cuStreamCreate, Needs::kContext,
              [&] { return create_stream(handle, flags, 0); });
}

KVSIM_API CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
  return call(Function::cuStreamCreateWithPriority, Needs::kContext,
              [&] { return create_stream(handle, flags, priority); });
}

KVSIM_API CUresult cuStreamDestroy_v2(CUstream handle) {
  return call(Function::cuStreamDestroy_v2, Needs::kContext,
              [&] { return destroy_stream(handle); });
}

KVSIM_API CUresult cuStreamSynchronize(CUstream handle) {
  return call(Function::cuStreamSynchronize, Needs::kContext,
              [&] { return synchronize_stream(handle); });
}

KVSIM_API CUresult cuStreamQuery(CUstream handle) {
  return call(Function::cuStreamQuery, Needs::kContext, [&] { return query_stream(handle); });
}

KVSIM_API CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
  return call(Function::cuStreamWaitEvent, Needs::kContext,
              [&] { return wait_event(handle, event); });
}

namespace {
template <class Value, class Pick>
CUresult ask(Function function, CUstream handle, Value* value, Pick pick) {
  return call(function, Needs::kContext, [&] {
    StreamFacts facts{};
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = stream_facts(handle, &facts);
    if (result == CUDA_SUCCESS) *value = pick(facts);
    return result;
  });
}
}  // namespace

KVSIM_API CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
  return ask(Function::cuStreamGetFlags, handle, flags,
             [](const StreamFacts& facts) { return facts.flags; });
}

KVSIM_API CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  return ask(Function::cuStreamGetPriority, handle, priority,
             [](const StreamFacts& facts) { return facts.priority; });
}

KVSIM_API CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return ask(Function::cuStreamGetCtx, handle, context,
             [](const StreamFacts& facts) { return reinterpret_cast<CUcontext>(facts.context); });
}

KVSIM_API CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
  return ask(Function::cuStreamGetId, handle, id,
             [](const StreamFacts& facts) { return facts.id; });
}

KVSIM_API CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  return call(Function::cuLaunchHostFunc, Needs::kContext, [&] {
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(handle, [function, data] { function(data); });
  });
}

KVSIM_API CUresult cuEventCreate(CUevent* handle, unsigned flags) {
  return call(Function::cuEventCreate, Needs::kContext,
              [&] { return create_event(handle, flags); });
}

KVSIM_API CUresult cuEventDestroy_v2(CUevent handle) {
  return call(Function::cuEventDestroy_v2, Needs::kInit, [&] { return destroy_event(handle); });
}

KVSIM_API CUresult cuEventRecord(CUevent handle, CUstream stream) {
  return call(Function::cuEventRecord, Needs::kContext,
              [&] { return record_event(handle, stream); });
}

KVSIM_API CUresult cuEventRecordWithFlags(CUevent handle, CUstream stream, unsigned) {
  return call(Function::cuEventRecordWithFlags, Needs::kContext,
              [&] { return record_event(handle, stream); });
}

KVSIM_API CUresult cuEventQuery(CUevent handle) {
  return call(Function::cuEventQuery, Needs::kInit, [&] { return query_event(handle); });
}

KVSIM_API CUresult cuEventSynchronize(CUevent handle) {
  return call(Function::cuEventSynchronize, Needs::kInit,
              [&] { return synchronize_event(handle); });
}

KVSIM_API CUresult cuEventElapsedTime(float* ms, CUevent start, CUevent end) {
  return call(Function::cuEventElapsedTime, Needs::kInit,
              [&] { return elapsed_ms(ms, start, end); });
}
