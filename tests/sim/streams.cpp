#include "streams.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "capture.h"
#include "settings.h"

namespace kvsim {

using StreamPtr = std::shared_ptr<Stream>;

/// Items of `stream` up to `item` must have run.
struct Until {
  StreamPtr stream;
  std::uint64_t item = 0;
};

struct Item {
  std::function<void()> run;
  std::vector<Until> waits;
  bool gate = false;      // runs until it is released
  std::uint64_t due = 0;  // not before so many looks
};

struct Stream {
  Context* context = nullptr;
  bool legacy = false;
  unsigned flags = 0;
  int priority = 0;
  std::uint64_t id = 0;
  std::uint64_t queued = 0;
  std::uint64_t done = 0;
  std::deque<Item> items;

  bool blocking() const { return !legacy && (flags & CU_STREAM_NON_BLOCKING) == 0; }
  bool idle() const { return done == queued; }
};

struct Event {
  const Context* context = nullptr;
  unsigned flags = 0;
  bool recorded = false;
  bool captured = false;  // its last record is part of a graph
  Until at;
  std::shared_ptr<std::chrono::steady_clock::time_point> when;
};

namespace {

/// All streams and events of the process, under one lock; never destroyed.
struct Streams {
  std::mutex mutex;
  std::condition_variable progress;
  std::map<std::uintptr_t, StreamPtr> by_handle;
  std::map<const Context*, StreamPtr> legacy;
  std::map<std::uintptr_t, Event> events;
  std::uint64_t next = 0x1000;  // handles are not used again
  std::uint64_t looks = 0;      // how often somebody has asked whether work is done
};

Streams& all() {
  static auto* const streams = new Streams;
  return *streams;
}

template <class Handle>
std::uintptr_t key(Handle handle) {
  return reinterpret_cast<std::uintptr_t>(handle);
}

constexpr std::uintptr_t kDestroyed = 1;  // in the key of a destroyed stream with work pending
constexpr std::uintptr_t kPerThread = 2;  // CU_STREAM_PER_THREAD, the last of the special handles

StreamPtr find(CUstream handle) {
  if (key(handle) <= kPerThread) {
    Context* context = current_or_first_context();
    StreamPtr& legacy = all().legacy[context];
    if (legacy == nullptr) {
      legacy = std::make_shared<Stream>();
      legacy->context = context;
      legacy->legacy = true;
    }
    return legacy;
  }
  const auto found = all().by_handle.find(key(handle));
  return found == all().by_handle.end() ? nullptr : found->second;
}

bool everything_held() {
  return !settings().hold.empty() && ::access(settings().hold.c_str(), F_OK) == 0;
}

bool advance(Stream& stream) {
  bool advanced = false;
  while (!stream.items.empty()) {
    Item& item = stream.items.front();
    const bool waits = std::any_of(item.waits.begin(), item.waits.end(), [](const Until& until) {
      return until.stream->done < until.item;
    });
    if (waits || item.gate || item.due > all().looks) break;
    if (item.run) item.run();
    stream.items.pop_front();
    ++stream.done;
    advanced = true;
  }
  return advanced;
}

/// Runs what can run, until nothing can.
void pump() {
  Streams& streams = all();
  if (everything_held()) return;
  bool advanced = true;
  bool any = false;
  while (advanced) {
    advanced = false;
    for (auto& [context, stream] : streams.legacy) advanced = advance(*stream) || advanced;
    for (auto& [handle, stream] : streams.by_handle) advanced = advance(*stream) || advanced;
    any = any || advanced;
  }
  if (!any) return;
  std::erase_if(streams.by_handle, [](const auto& entry) {
    return (entry.first & kDestroyed) != 0 && entry.second->idle();
  });
  streams.progress.notify_all();
}

void queue(const StreamPtr& stream, Item item) {
  Streams& streams = all();
  if (stream->legacy) {
    for (const auto& [handle, other] : streams.by_handle) {
      if (other->context == stream->context && other->blocking() && !other->idle()) {
        item.waits.push_back({other, other->queued});
      }
    }
  } else if (stream->blocking()) {
    const auto legacy = streams.legacy.find(stream->context);
    if (legacy != streams.legacy.end() && !legacy->second->idle()) {
      item.waits.push_back({legacy->second, legacy->second->queued});
    }
  }
  item.due = streams.looks + settings().lag;
  stream->items.push_back(std::move(item));
  ++stream->queued;
  pump();
}

/// Somebody asks whether work is done: with KVSIM_LAG it is not at once.
void look() {
  ++all().looks;
  pump();
}

/// Waits until `reached()`. A hold file has nobody who notifies: it is looked at now and then.
template <class Reached>
void wait(std::unique_lock<std::mutex>& lock, Reached reached) {
  constexpr auto kLookAgain = std::chrono::microseconds(500);
  pump();
  if (reached()) return;
  all().looks += settings().lag;  // all that is queued by now
  pump();
  while (!reached()) {
    if (settings().hold.empty()) {
      all().progress.wait(lock);
    } else {
      all().progress.wait_for(lock, kLookAgain);
      pump();
    }
  }
}

/// A stream takes so many entries; a call that queues one more waits until one has run.
void wait_for_room(std::unique_lock<std::mutex>& lock, const StreamPtr& stream) {
  wait(lock, [&] { return stream->items.size() < settings().queue; });
}

/// Runs `body(stream)` under the lock, when there is such a stream.
template <class Body>
CUresult with_stream(CUstream handle, Body body) {
  std::unique_lock lock(all().mutex);
  const StreamPtr stream = find(handle);
  return stream == nullptr ? CUDA_ERROR_INVALID_HANDLE : body(stream, lock);
}

template <class Body>
CUresult with_event(CUevent handle, Body body) {
  std::unique_lock lock(all().mutex);
  const auto event = all().events.find(key(handle));
  return event == all().events.end() ? CUDA_ERROR_INVALID_HANDLE : body(event->second, lock);
}

/// Work in the legacy stream would wait for blocking streams that are being captured.
CUresult refuse_legacy(const Stream& stream) {
  return stream.legacy ? check_legacy(stream.context) : CUDA_SUCCESS;
}

/// Nobody can wait for a stream that is being captured: nothing in it runs.
CUresult refuse_captured(CUstream handle) {
  if (!is_captured(key(handle))) return CUDA_SUCCESS;
  lose_capture(key(handle));
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

bool reached(const Until& until) {
  return until.stream == nullptr || until.stream->done >= until.item;
}

}  // namespace

CUresult create_stream(CUstream* handle, unsigned flags, int priority) {
  if (handle == nullptr || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(all().mutex);
  auto stream = std::make_shared<Stream>();
  stream->context = current_context();
  if (const CUresult grown = grow(stream->context); grown != CUDA_SUCCESS) return grown;
  stream->flags = flags;
  stream->priority = std::clamp(priority, kHighestPriority, kLowestPriority);
  stream->id = all().next;
  *handle = reinterpret_cast<CUstream>(all().next);
  all().by_handle[all().next] = std::move(stream);
  all().next += 0x10;
  return CUDA_SUCCESS;
}

// As in the real driver the call returns at once; what is pending in the stream still happens.
CUresult destroy_stream(CUstream handle) {
  if (key(handle) <= kPerThread) return CUDA_ERROR_INVALID_HANDLE;
  return with_stream(handle, [&](const StreamPtr& stream, auto&) {
    // With work pending: out of reach for its handle, in reach of pump().
    if (!stream->idle()) all().by_handle[key(handle) | kDestroyed] = stream;
    all().by_handle.erase(key(handle));
    return CUDA_SUCCESS;
  });
}

CUresult query_stream(CUstream handle) {
  return with_stream(handle, [&](const StreamPtr& stream, auto&) {
    if (const CUresult refused = refuse_captured(handle); refused != CUDA_SUCCESS) return refused;
    look();
    return stream->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult synchronize_stream(CUstream handle) {
  return with_stream(handle, [&](const StreamPtr& stream, auto& lock) {
    if (const CUresult refused = refuse_captured(handle); refused != CUDA_SUCCESS) return refused;
    const std::uint64_t until = stream->queued;
    wait(lock, [&] { return stream->done >= until; });
    return CUDA_SUCCESS;
  });
}

CUresult synchronize_context() {
  std::unique_lock lock(all().mutex);
  std::vector<Until> open;
  const Context* context = current_context();
  for (const auto& [handle, stream] : all().by_handle) {
    if (stream->context == context) open.push_back({stream, stream->queued});
  }
  if (const auto legacy = all().legacy.find(context); legacy != all().legacy.end()) {
    open.push_back({legacy->second, legacy->second->queued});
  }
  wait(lock, [&] { return std::all_of(open.begin(), open.end(), reached); });
  return CUDA_SUCCESS;
}

CUresult wait_event(CUstream handle, CUevent event) {
  return with_stream(handle, [&](const StreamPtr& stream, auto&) {
    const auto found = all().events.find(key(event));
    if (found == all().events.end()) return CUDA_ERROR_INVALID_HANDLE;
    if (is_captured(key(handle))) return CUDA_SUCCESS;
    if (!reached(found->second.at)) queue(stream, Item{{}, {found->second.at}});
    return CUDA_SUCCESS;
  });
}

CUresult stream_facts(CUstream handle, StreamFacts* facts) {
  return with_stream(handle, [&](const StreamPtr& stream, auto&) {
    *facts = {stream->flags, stream->priority, stream->id, stream->context};
    return CUDA_SUCCESS;
  });
}

CUresult enqueue(CUstream handle, std::function<void()> run) {
  return with_stream(handle, [&](const StreamPtr& stream, auto& lock) {
    if (is_captured(key(handle))) return CUDA_SUCCESS;
    if (const CUresult refused = refuse_legacy(*stream); refused != CUDA_SUCCESS) return refused;
    wait_for_room(lock, stream);
    queue(stream, Item{std::move(run), {}});
    return CUDA_SUCCESS;
  });
}

CUresult enqueue_kernel(CUstream handle, std::function<void()> run) {
  const CUresult loaded = with_stream(handle, [&](const StreamPtr& stream, auto&) {
    if (stream->context->has_kernels) return CUDA_SUCCESS;
    const CUresult grown = grow(stream->context);
    stream->context->has_kernels = grown == CUDA_SUCCESS;
    return grown;
  });
  return loaded == CUDA_SUCCESS ? enqueue(handle, std::move(run)) : loaded;
}

CUresult create_event(CUevent* handle, unsigned flags) {
  constexpr unsigned kKnown =
      CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (handle == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(all().mutex);
  Event event;
  event.context = current_context();
  event.flags = flags;
  *handle = reinterpret_cast<CUevent>(all().next);
  all().events[all().next] = std::move(event);
  all().next += 0x10;
  return CUDA_SUCCESS;
}

CUresult destroy_event(CUevent handle) {
  return with_event(handle, [&](Event&, auto&) {
    all().events.erase(key(handle));
    return CUDA_SUCCESS;
  });
}

CUresult record_event(CUevent handle, CUstream stream_handle) {
  const CUresult room = with_stream(stream_handle, [&](const StreamPtr& stream, auto& lock) {
    if (!is_captured(key(stream_handle))) wait_for_room(lock, stream);
    return CUDA_SUCCESS;
  });
  if (room != CUDA_SUCCESS) return room;
  return with_event(handle, [&](Event& event, auto&) {
    const StreamPtr stream = find(stream_handle);
    if (stream == nullptr || stream->context != event.context) return CUDA_ERROR_INVALID_HANDLE;
    event.captured = is_captured(key(stream_handle));
    if (event.captured) return CUDA_SUCCESS;
    if (const CUresult refused = refuse_legacy(*stream); refused != CUDA_SUCCESS) return refused;
    auto when = std::make_shared<std::chrono::steady_clock::time_point>();
    event.recorded = true;
    event.at = {stream, stream->queued + 1};
    event.when = when;
    queue(stream, Item{[when] { *when = std::chrono::steady_clock::now(); }, {}});
    return CUDA_SUCCESS;
  });
}

CUresult query_event(CUevent handle) {
  return with_event(handle, [](const Event& event, auto&) {
    if (event.captured) return CUDA_ERROR_CAPTURED_EVENT;
    look();
    return reached(event.at) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult synchronize_event(CUevent handle) {
  return with_event(handle, [](const Event& event, auto& lock) {
    if (event.captured) return CUDA_ERROR_CAPTURED_EVENT;
    const Until at = event.at;  // the event may be recorded again, or destroyed, meanwhile
    wait(lock, [&] { return reached(at); });
    return CUDA_SUCCESS;
  });
}

CUresult elapsed_ms(float* ms, CUevent start, CUevent end) {
  const std::lock_guard lock(all().mutex);
  const auto from = all().events.find(key(start));
  const auto to = all().events.find(key(end));
  if (from == all().events.end() || to == all().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  for (const auto& event : {from, to}) {
    if (!event->second.recorded || (event->second.flags & CU_EVENT_DISABLE_TIMING) != 0) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
  }
  pump();
  if (!reached(from->second.at) || !reached(to->second.at)) return CUDA_ERROR_NOT_READY;
  if (ms == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *ms = std::chrono::duration<float, std::milli>(*to->second.when - *from->second.when).count();
  return CUDA_SUCCESS;
}

CUresult begin_capture(CUstream handle, CUstreamCaptureMode mode) {
  return with_stream(handle, [&](const StreamPtr& stream, auto&) {
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return open_capture(key(handle), stream->context, stream->blocking(), mode);
  });
}

CUresult end_capture(CUstream handle, CUgraph* graph) {
  return with_stream(handle, [&](const StreamPtr&, auto&) {
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *graph = nullptr;
    const CUresult result = close_capture(key(handle));
    if (result == CUDA_SUCCESS) *graph = reinterpret_cast<CUgraph>(all().next += 0x10);
    return result;
  });
}

CUresult capture_status(CUstream handle, CUstreamCaptureStatus* status) {
  return with_stream(handle, [&](const StreamPtr& stream, auto&) {
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult refused = refuse_legacy(*stream); refused != CUDA_SUCCESS) return refused;
    *status = !is_captured(key(handle))      ? CU_STREAM_CAPTURE_STATUS_NONE
              : is_capture_lost(key(handle)) ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                             : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  });
}

void destroy_streams_of(const Context* context) {
  const std::lock_guard lock(all().mutex);
  drop_captures_of(context);
  const auto finish = [](Stream& stream) {
    stream.items.clear();
    stream.done = stream.queued;
  };
  for (auto stream = all().by_handle.begin(); stream != all().by_handle.end();) {
    if (stream->second->context != context) {
      ++stream;
      continue;
    }
    finish(*stream->second);
    stream = all().by_handle.erase(stream);
  }
  if (const auto legacy = all().legacy.find(context); legacy != all().legacy.end()) {
    finish(*legacy->second);
    all().legacy.erase(legacy);
  }
  std::erase_if(all().events, [&](const auto& event) { return event.second.context == context; });
  pump();
  all().progress.notify_all();
}

CUresult hold_stream(CUstream handle) {
  return with_stream(handle, [](const StreamPtr& stream, auto&) {
    Item gate;
    gate.gate = true;
    queue(stream, std::move(gate));
    return CUDA_SUCCESS;
  });
}

CUresult release_stream(CUstream handle) {
  return with_stream(handle, [](const StreamPtr& stream, auto&) {
    const auto gate = std::find_if(stream->items.begin(), stream->items.end(),
                                   [](const Item& item) { return item.gate; });
    if (gate == stream->items.end()) return CUDA_ERROR_INVALID_VALUE;
    gate->gate = false;
    pump();
    return CUDA_SUCCESS;
  });
}

}  // namespace kvsim
