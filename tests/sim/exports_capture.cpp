// Captures of CUDA graphs, by their driver names. No graph can be launched: what is in one is
// forgotten.
#include "api.h"
#include "call.h"
#include "capture.h"
#include "streams.h"

using namespace kvsim;

KVSIM_API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return call(Function::cuThreadExchangeStreamCaptureMode, Needs::kInit,
              [&] { return exchange_capture_mode(mode); });
}

KVSIM_API CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  return call(Function::cuStreamBeginCapture_v2, Needs::kContext,
              [&] { return begin_capture(handle, mode); });
}

KVSIM_API CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return call(Function::cuStreamEndCapture, Needs::kContext,
              [&] { return end_capture(handle, graph); });
}

KVSIM_API CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return call(Function::cuStreamIsCapturing, Needs::kContext,
              [&] { return capture_status(handle, status); });
}

KVSIM_API CUresult cuGraphDestroy(CUgraph graph) {
  return call(Function::cuGraphDestroy, Needs::kInit,
              [&] { return graph != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; });
}
