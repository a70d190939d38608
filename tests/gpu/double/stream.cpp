// Streams, events, capture and graphs.
#include "state.h"

#include <algorithm>
#include <chrono>

using namespace hip_double;

namespace {

uint64_t now() {
  return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
}

thread_local int64_t taken_ns; // by the work in progress, where take() said it

std::shared_ptr<Event> &event_of(void *handle) {
  return *static_cast<std::shared_ptr<Event> *>(handle);
}

void work(Stream &s) {
  for (;;) {
    std::unique_lock<std::mutex> lock(s.mutex);
    if (s.queue.empty() && s.busy) {
      s.busy = false;
      lock.unlock();
      close_memory();
      lock.lock();
      s.changed.notify_all();
    }
    s.changed.wait(lock, [&] { return !s.queue.empty() || s.ending; });
    if (s.queue.empty()) return;
    Work next = std::move(s.queue.front());
    s.queue.pop_front();
    const bool began = !s.busy;
    s.busy = true;
    lock.unlock();
    if (began) open_memory();
    const uint64_t begin = now();
    taken_ns = -1;
    next();
    s.worked += taken_ns < 0 ? now() - begin : uint64_t(taken_ns);
  }
}

void drain(Stream &s) {
  std::unique_lock<std::mutex> lock(s.mutex);
  s.changed.wait(lock, [&] { return s.queue.empty() && !s.busy; });
}

Stream *capturing_stream() { // of the calling thread
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (Stream *stream : s.streams)
    if (stream->capture && stream->capturer == std::this_thread::get_id()) return stream;
  return nullptr;
}

} // namespace

namespace hip_double {

void take(uint64_t ns) {
  taken_ns = std::max(taken_ns, int64_t(0)) + int64_t(ns);
}

int refuse_while_capturing() {
  Stream *stream = capturing_stream();
  if (!stream) return hipSuccess;
  stream->invalidated = true;
  return hipErrorStreamCaptureUnsupported;
}

int enqueue(Stream *stream, Work work) {
  if (stream->capture) {
    if (stream->invalidated) return hipErrorStreamCaptureInvalidated;
    stream->capture->nodes.push_back(std::move(work));
    return hipSuccess;
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->queue.push_back([work = std::move(work)] {
    if (!state().sticky.load()) work(); // nothing runs after a fault
  });
  stream->changed.notify_all();
  return hipSuccess;
}

void drain_all() {
  std::vector<Stream *> all;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    all.assign(state().streams.begin(), state().streams.end());
  }
  for (Stream *s : all) drain(*s);
}

} // namespace hip_double

HIP_API int hipStreamCreateWithFlags(void **out, unsigned) {
  CHECK_STICKY();
  auto *stream = new Stream;
  stream->thread = std::thread([stream] { work(*stream); });
  std::lock_guard<std::mutex> lock(state().mutex);
  state().streams.insert(stream);
  publish();
  *out = stream;
  return hipSuccess;
}

// Waits for what is enqueued (HIP documentation, hipStreamDestroy: it may).
HIP_API int hipStreamDestroy(void *handle) {
  CHECK_STICKY();
  auto *stream = static_cast<Stream *>(handle);
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (!state().streams.erase(stream)) return hipErrorInvalidHandle;
    publish();
  }
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->ending = true;
    stream->changed.notify_all();
  }
  stream->thread.join();
  delete stream;
  return hipSuccess;
}

// A kernel's fault shows here, at an event, or at whatever is called next.
HIP_API int hipStreamSynchronize(void *handle) {
  CHECK_STICKY();
  auto *stream = static_cast<Stream *>(handle);
  if (stream->capture) return stream->invalidated = true, int(hipErrorStreamCaptureUnsupported);
  drain(*stream);
  return state().sticky.load();
}

HIP_API int hipEventCreateWithFlags(void **out, unsigned flags) {
  CHECK_STICKY();
  auto *handle = new std::shared_ptr<Event>(std::make_shared<Event>());
  (*handle)->timing = !(flags & 2);
  std::lock_guard<std::mutex> lock(state().mutex);
  state().events.insert(handle);
  publish();
  *out = handle;
  return hipSuccess;
}

HIP_API int hipEventDestroy(void *handle) {
  CHECK_STICKY();
  auto *event = static_cast<std::shared_ptr<Event> *>(handle);
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!state().events.erase(event)) return hipErrorInvalidHandle;
  publish();
  delete event;
  return hipSuccess;
}

HIP_API int hipEventRecord(void *handle, void *stream_handle) {
  CHECK_STICKY();
  std::shared_ptr<Event> event = event_of(handle);
  auto *stream = static_cast<Stream *>(stream_handle);
  if (stream->capture) { // a dependency inside of the graph, which nobody can wait for
    event->captured = true;
    return hipSuccess;
  }
  event->captured = false;
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = ++event->recorded;
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->queue.push_back([event, number, stream] {
    std::lock_guard<std::mutex> inner(event->mutex);
    event->passed = number;
    event->time = stream->worked;
    take(0);
    event->changed.notify_all();
  });
  stream->changed.notify_all();
  return hipSuccess;
}

HIP_API int hipEventQuery(void *handle) {
  CHECK_STICKY();
  if (const int refused = refuse_while_capturing()) return refused;
  const std::shared_ptr<Event> event = event_of(handle);
  if (event->captured) return hipErrorCapturedEvent;
  std::lock_guard<std::mutex> lock(event->mutex);
  if (event->passed < event->recorded) return hipErrorNotReady;
  return state().sticky.load();
}

HIP_API int hipEventSynchronize(void *handle) {
  CHECK_STICKY();
  if (const int refused = refuse_while_capturing()) return refused;
  const std::shared_ptr<Event> event = event_of(handle);
  if (event->captured) return hipErrorCapturedEvent;
  std::unique_lock<std::mutex> lock(event->mutex);
  const uint64_t number = event->recorded;
  event->changed.wait(lock, [&] { return event->passed >= number; });
  return state().sticky.load();
}

HIP_API int hipEventElapsedTime(float *ms, void *first, void *second) {
  CHECK_STICKY();
  const std::shared_ptr<Event> a = event_of(first), b = event_of(second);
  if (!a->timing || !b->timing || !a->recorded || !b->recorded) return hipErrorInvalidHandle;
  std::scoped_lock lock(a->mutex, b->mutex);
  if (a->passed < a->recorded || b->passed < b->recorded) return hipErrorNotReady;
  *ms = float(double(int64_t(b->time - a->time)) * 1e-6);
  return hipSuccess;
}

// Capturing has been refused without the program's fault: a stale state of an earlier capture (ROCm 6.4,
// ROCm/legacy-rocm-build#4614), operations that a release no longer captures (ROCm 7.0,
// ROCm/legacy-rocm-build#5337). "capture" is begin, end or instantiate.
HIP_API int hipStreamBeginCapture(void *handle, int mode) {
  CHECK_STICKY();
  auto *stream = static_cast<Stream *>(handle);
  if (fault("capture") == "begin") return hipErrorStreamCaptureUnsupported;
  if (stream->capture || mode < 0 || mode > 2) return hipErrorInvalidValue;
  std::lock_guard<std::mutex> lock(state().mutex);
  stream->capture = std::make_unique<Graph>();
  stream->capturer = mode == 2 ? std::thread::id() : std::this_thread::get_id();
  stream->invalidated = false;
  return hipSuccess;
}

HIP_API int hipStreamEndCapture(void *handle, void **out) {
  CHECK_STICKY();
  auto *stream = static_cast<Stream *>(handle);
  *out = nullptr;
  if (!stream->capture) return hipErrorStreamCaptureUnmatched;
  if (stream->capturer != std::thread::id() && stream->capturer != std::this_thread::get_id())
    return hipErrorStreamCaptureWrongThread;
  const bool fails = fault("capture") == "end";
  std::lock_guard<std::mutex> lock(state().mutex);
  const std::unique_ptr<Graph> graph = std::move(stream->capture);
  if (stream->invalidated || fails) return hipErrorStreamCaptureInvalidated;
  auto *made = new Graph(*graph);
  state().graphs.insert(made);
  publish();
  *out = made;
  return hipSuccess;
}

HIP_API int hipGraphInstantiate(void **out, void *handle, void **, char *, size_t) {
  CHECK_STICKY();
  *out = nullptr;
  if (fault("capture") == "instantiate") return hipErrorOutOfMemory;
  auto *exec = new std::shared_ptr<Graph>(std::make_shared<Graph>(*static_cast<Graph *>(handle)));
  std::lock_guard<std::mutex> lock(state().mutex);
  state().execs.insert(exec);
  publish();
  *out = exec;
  return hipSuccess;
}

HIP_API int hipGraphLaunch(void *handle, void *stream) {
  CHECK_STICKY();
  if (!fault("graph_launch").empty()) return hipErrorLaunchFailure;
  const std::shared_ptr<Graph> graph = *static_cast<std::shared_ptr<Graph> *>(handle);
  return enqueue(static_cast<Stream *>(stream), [graph] {
    for (const Work &node : graph->nodes)
      if (!state().sticky.load()) node();
  });
}

HIP_API int hipGraphDestroy(void *handle) {
  CHECK_STICKY();
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!state().graphs.erase(static_cast<Graph *>(handle))) return hipErrorInvalidHandle;
  publish();
  delete static_cast<Graph *>(handle);
  return hipSuccess;
}

HIP_API int hipGraphExecDestroy(void *handle) {
  CHECK_STICKY();
  auto *exec = static_cast<std::shared_ptr<Graph> *>(handle);
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!state().execs.erase(exec)) return hipErrorInvalidHandle;
  publish();
  delete exec; // what runs keeps its own
  return hipSuccess;
}
