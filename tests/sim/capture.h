// CUDA graphs that are being captured: in which streams, and which calls end them.
//
// What is queued in such a stream becomes part of a graph and does not run. A thread whose capture
// mode is not relaxed may not make unsafe calls meanwhile: the call answers
// STREAM_CAPTURE_UNSUPPORTED, and the capture is lost, which cuStreamEndCapture says.
#pragma once

#include <cstdint>

#include "api.h"
#include "context.h"
#include "cuda_abi.h"

namespace kvsim {

/// What a thread's mode and a capture's mode forbid is cuThreadExchangeStreamCaptureMode's rule.
CUresult exchange_capture_mode(CUstreamCaptureMode* mode);

/// Every call begins with this. CUDA_SUCCESS: it may go on.
CUresult check_captures(Function function);

// By streams.cpp, with the streams' lock held; `stream` is a handle as a number.
CUresult open_capture(std::uintptr_t stream, const Context* context, bool blocking,
                      CUstreamCaptureMode mode);
/// STREAM_CAPTURE_INVALIDATED where it was lost, STREAM_CAPTURE_UNMATCHED where there is none.
CUresult close_capture(std::uintptr_t stream);
bool is_captured(std::uintptr_t stream);
bool is_capture_lost(std::uintptr_t stream);
/// A call that never goes with a capture of this stream: it is lost.
void lose_capture(std::uintptr_t stream);
/// Those of a context that is going away.
void drop_captures_of(const Context* context);
/// STREAM_CAPTURE_IMPLICIT, and the captures are lost, where blocking streams of the context are
/// captured: work in the legacy default stream would wait for them.
CUresult check_legacy(const Context* context);

}  // namespace kvsim
