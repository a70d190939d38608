// The GPU runtime: libamdhip64 or libcuda's driver API, opened at run time behind one table, so that libapu.so links
// neither. One Driver for each kind and process; handles are the runtime's own pointers.
//
// Every call returns a status whose text holds the runtime's own name of the error and what was being done. Calls are
// safe from any thread once `use_device` has been called by that thread.
#pragma once

#include "common.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace apu::gpu {

using Stream = void *;
using Event = void *;
using Module = void *;
using Function = void *;
using Graph = void *; // instantiated

struct DriverProps {
  std::string name;
  std::string arch; // "gfx1151", "sm_90"; of AMD without its feature suffix
  bool integrated = false;
  bool pageable = false; // reads pageable host memory through the host's page tables
  uint32_t wave_size = 0;
  bool bulk_copies = false; // kernels for it copy to LDS in bulk (gpu.h)
  uint32_t compute_units = 0;
  uint32_t lds_bytes = 0;       // of a block, at most (with opt-in where there is one)
  uint32_t lds_of_unit = 0;     // of a compute unit
  uint32_t threads_of_unit = 0; // resident at most
  uint64_t memory_bytes = 0;
  uint64_t l2_bytes = 0;
  uint64_t driver_version = 0;
};

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
};

struct HostRange { // whole pages
  void *host = nullptr;
  uint64_t bytes = 0;
  bool read_only = false; // no mapping of it is writable
};

struct Registration {
  uint64_t device = 0;                // where the device reads the range's first byte
  uint32_t grain = APU_GRAIN_UNKNOWN; // as the runtime says
};

class Driver {
public:
  // "hip" or "cuda"; APU_E_UNSUPPORTED with the reason where the library is missing or shows no device. `runtime` is
  // the file of libamdhip64, or null; the environment variable APU_HIP_LIBRARY wins over it.
  static apu_status open(const char *kind, const char *runtime, Driver **out);
  virtual ~Driver() = default;

  virtual const char *kind() const = 0;
  virtual apu_status device_count(uint32_t &out) = 0;
  virtual apu_status device_props(uint32_t index, DriverProps &out) = 0;
  virtual apu_status use_device(uint32_t index) = 0; // for the calling thread
  virtual apu_status memory_info(uint64_t &free, uint64_t &total) = 0;

  virtual apu_status alloc(uint64_t bytes, uint64_t &out) = 0;
  virtual apu_status free(uint64_t address) = 0;
  virtual apu_status host_alloc(uint64_t bytes, void *&host, uint64_t &device) = 0; // pinned, coherent, mapped
  virtual apu_status host_free(void *host) = 0;
  // Host pages read in place: 1 << APU_WAY_* for each way that the runtime has the functions of. Registering, one of
  // these: refused is APU_E_DEVICE. `device` is the index that use_device chose for the calling thread.
  virtual uint32_t ways() const = 0;
  virtual apu_status host_register(uint32_t way, uint32_t device, const HostRange &range, Registration &out) = 0;
  virtual void host_unregister(uint32_t way, uint32_t device, const HostRange &range) = 0;
  virtual apu_status copy_to_device(uint64_t to, const void *from, uint64_t bytes, Stream stream) = 0; // async
  virtual apu_status copy_to_host(void *to, uint64_t from, uint64_t bytes, Stream stream) = 0;         // async
  virtual apu_status copy_on_device(uint64_t to, uint64_t from, uint64_t bytes, Stream stream) = 0;    // async
  virtual apu_status fill(uint64_t to, uint8_t value, uint64_t bytes, Stream stream) = 0;              // async

  virtual apu_status stream_create(Stream &out) = 0;
  virtual apu_status stream_destroy(Stream stream) = 0;
  virtual apu_status stream_wait(Stream stream) = 0;
  virtual apu_status event_create(Event &out, bool timing) = 0;
  virtual apu_status event_destroy(Event event) = 0;
  virtual apu_status event_record(Event event, Stream stream) = 0;
  virtual apu_status event_query(Event event, bool &ended) = 0; // also where an earlier kernel's fault shows
  virtual apu_status event_wait(Event event) = 0;
  virtual apu_status event_elapsed(Event begin, Event end, float &ms) = 0;

  virtual apu_status module_load(const void *image, size_t bytes, Module &out) = 0;
  virtual apu_status module_unload(Module module) = 0;
  virtual apu_status module_function(Module module, const char *name, Function &out) = 0;
  virtual apu_status function_lds(Function function, uint32_t bytes) = 0; // allows so much dynamic LDS
  // One argument: a struct of `bytes` by value.
  virtual apu_status launch(Function function, Dim grid, uint32_t threads, uint32_t lds, Stream stream,
                            const void *argument, size_t bytes) = 0;

  virtual apu_status capture_begin(Stream stream) = 0;
  virtual apu_status capture_end(Stream stream, Graph &out) = 0; // instantiated; on failure nothing is left behind
  virtual apu_status graph_launch(Graph graph, Stream stream) = 0;
  virtual apu_status graph_destroy(Graph graph) = 0;
};

} // namespace apu::gpu
