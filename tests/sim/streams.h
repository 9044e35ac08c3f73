// Streams and events: work in order, done at once unless a test holds it back.
//
// A stream is a queue. An item runs when all before it in its stream have, and when the items it
// waits for in other streams have: an event's, or, between the legacy default stream and streams
// that are not CU_STREAM_NON_BLOCKING, everything that was queued in the other before.
//
// hold(stream) queues an item that runs until release(stream): a kernel that takes its time. What
// is queued behind it, and what waits for that, is then pending: queries answer NOT_READY.
//
// With KVSIM_LAG work also waits for looks: an item runs when the process has asked so many times
// since whether something is done, or when a call waits for it.
#pragma once

#include <cstdint>
#include <functional>

#include "context.h"
#include "cuda_abi.h"

namespace kvsim {

struct Stream;
struct Event;

inline constexpr int kLowestPriority = 0;
inline constexpr int kHighestPriority = -5;

/// All of these are thread-safe. A null handle is the legacy default stream of the current context,
/// as are 1 (CU_STREAM_LEGACY) and 2 (CU_STREAM_PER_THREAD, which the simulation does not tell
/// apart). An unknown or destroyed handle answers CUDA_ERROR_INVALID_HANDLE.
CUresult create_stream(CUstream* handle, unsigned flags, int priority);
CUresult destroy_stream(CUstream handle);
CUresult query_stream(CUstream handle);
CUresult synchronize_stream(CUstream handle);
CUresult synchronize_context();
CUresult wait_event(CUstream handle, CUevent event);

struct StreamFacts {
  unsigned flags;
  int priority;
  std::uint64_t id;
  Context* context;
};
CUresult stream_facts(CUstream handle, StreamFacts* facts);

/// Queues `run`; it is carried out by this call when nothing is in its way, otherwise by the call
/// that takes away what is. `run` must not touch streams.
CUresult enqueue(CUstream handle, std::function<void()> run);
/// As enqueue(). The first kernel of a context makes it grow: its code is loaded then.
CUresult enqueue_kernel(CUstream handle, std::function<void()> run);

CUresult create_event(CUevent* handle, unsigned flags);
CUresult destroy_event(CUevent handle);
CUresult record_event(CUevent handle, CUstream stream);
CUresult query_event(CUevent handle);
CUresult synchronize_event(CUevent handle);
CUresult elapsed_ms(float* ms, CUevent start, CUevent end);

CUresult begin_capture(CUstream handle, CUstreamCaptureMode mode);
CUresult end_capture(CUstream handle, CUgraph* graph);
CUresult capture_status(CUstream handle, CUstreamCaptureStatus* status);

/// Every stream and event of a context that is going away. Pending work never happens.
void destroy_streams_of(const Context* context);

CUresult hold_stream(CUstream handle);
CUresult release_stream(CUstream handle);

}  // namespace kvsim
