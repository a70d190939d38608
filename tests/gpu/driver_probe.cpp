// C functions over gpu::Driver, so that tests can call the driver without a plan: compiled with native/gpu/driver*.cpp.
// Statuses are APU_E_*; apu_last_error() has the text.
#include "common.h"
#include "gpu/driver.h"
#include "gpu/module.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#define PROBE extern "C" __attribute__((visibility("default")))

using namespace apu::gpu;

static Driver *driver;

PROBE int probe_open(const char *kind) {
  TRY(Driver::open(kind, nullptr, &driver));
  return driver->use_device(0);
}
PROBE int probe_props(uint32_t index, char *arch, uint64_t *numbers) {
  DriverProps p;
  TRY(driver->device_props(index, p));
  std::snprintf(arch, 64, "%s", p.arch.c_str());
  const uint64_t all[] = {p.integrated,  p.wave_size,       p.compute_units, p.lds_bytes,
                          p.lds_of_unit, p.threads_of_unit, p.memory_bytes,  p.l2_bytes};
  std::copy(std::begin(all), std::end(all), numbers);
  return APU_OK;
}
PROBE int probe_count(uint32_t *count) {
  return driver->device_count(*count);
}
PROBE int probe_use(uint32_t index) {
  return driver->use_device(index);
}
PROBE int probe_memory(uint64_t *free, uint64_t *total) {
  return driver->memory_info(*free, *total);
}
PROBE int probe_alloc(uint64_t bytes, uint64_t *out) {
  return driver->alloc(bytes, *out);
}
PROBE int probe_free(uint64_t address) {
  return driver->free(address);
}
PROBE int probe_host_alloc(uint64_t bytes, void **host, uint64_t *device) {
  return driver->host_alloc(bytes, *host, *device);
}
PROBE int probe_host_free(void *host) {
  return driver->host_free(host);
}
PROBE int probe_to_device(uint64_t to, const void *from, uint64_t bytes, void *stream) {
  return driver->copy_to_device(to, from, bytes, stream);
}
PROBE int probe_to_host(void *to, uint64_t from, uint64_t bytes, void *stream) {
  return driver->copy_to_host(to, from, bytes, stream);
}
PROBE int probe_on_device(uint64_t to, uint64_t from, uint64_t bytes, void *stream) {
  return driver->copy_on_device(to, from, bytes, stream);
}
PROBE int probe_fill(uint64_t to, uint32_t value, uint64_t bytes, void *stream) {
  return driver->fill(to, uint8_t(value), bytes, stream);
}
PROBE int probe_stream(void **out) {
  return driver->stream_create(*out);
}
PROBE int probe_stream_destroy(void *stream) {
  return driver->stream_destroy(stream);
}
PROBE int probe_stream_wait(void *stream) {
  return driver->stream_wait(stream);
}
PROBE int probe_event(uint32_t timing, void **out) {
  return driver->event_create(*out, timing != 0);
}
PROBE int probe_event_destroy(void *event) {
  return driver->event_destroy(event);
}
PROBE int probe_event_record(void *event, void *stream) {
  return driver->event_record(event, stream);
}
PROBE int probe_event_query(void *event, uint32_t *ended) {
  bool e = false;
  const int status = driver->event_query(event, e);
  *ended = e;
  return status;
}
PROBE int probe_event_wait(void *event) {
  return driver->event_wait(event);
}
PROBE int probe_event_elapsed(void *begin, void *end, float *ms) {
  return driver->event_elapsed(begin, end, *ms);
}
PROBE int probe_module(const void *image, uint64_t bytes, void **out) {
  return driver->module_load(image, bytes, *out);
}
PROBE int probe_module_unload(void *module) {
  return driver->module_unload(module);
}
PROBE int probe_function(void *module, const char *name, void **out) {
  return driver->module_function(module, name, *out);
}
PROBE int probe_launch(void *function, uint32_t x, uint32_t y, uint32_t z, uint32_t threads, uint32_t lds, void *stream,
                       const void *argument, uint64_t bytes) {
  return driver->launch(function, {x, y, z}, threads, lds, stream, argument, bytes);
}
PROBE int probe_capture_begin(void *stream) {
  return driver->capture_begin(stream);
}
PROBE int probe_capture_end(void *stream, void **out) {
  return driver->capture_end(stream, *out);
}
PROBE int probe_graph_launch(void *graph, void *stream) {
  return driver->graph_launch(graph, stream);
}
PROBE int probe_graph_destroy(void *graph) {
  return driver->graph_destroy(graph);
}
PROBE int probe_find_module(const char *kind, const char *arch, const char *folder, char *path) {
  std::string found;
  TRY(find_module(kind, arch, folder, found));
  std::snprintf(path, 1024, "%s", found.c_str());
  return APU_OK;
}
