// The kernels by themselves, for tests and benchmarks: the same makers as a plan's ops use, with a builder that has one
// product, one step of fixed sizes, and memory for the length of the call.
#include "gpu/buffer.h"
#include "gpu/kernels/checksum.h"
#include "gpu/kernels/read.h"
#include "gpu/ops.h"

#include "cpu/kernels.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace apu::gpu {
namespace {

constexpr uint64_t kAlign = 256;
constexpr uint32_t kGraphLaunches = 32; // at least so many products in a timed graph

// Whole words of 16 bytes in [in, in + bytes).
ReadArgs read_args(uint64_t in, uint64_t bytes, uint64_t sink) {
  const uint64_t begin = (in + 15) / 16 * 16, end = (in + bytes) / 16 * 16;
  return {reinterpret_cast<const u8 *>(begin), end > begin ? end - begin : 0, reinterpret_cast<u32 *>(sink)};
}
uint32_t read_blocks(const ReadArgs &args) {
  return uint32_t((args.bytes + kReadBlockBytes - 1) / kReadBlockBytes);
}

struct TimedEvent {
  explicit TimedEvent(Driver &runtime) : driver(runtime) {}
  ~TimedEvent() {
    if (event) driver.event_destroy(event);
  }
  apu_status create() { return driver.event_create(event, true); }
  Driver &driver;
  Event event = nullptr;
};

// A product with one copy of its matrix or several; without an input, plain reads of them.
class LoneProduct final : public Builder, public Launcher {
public:
  LoneProduct(Device &device, const KernelProduct &product) : device_(device), driver_(device.driver()), p_(product) {
    info_.max_rows = info_.max_outputs = p_.rows;
    info_.max_sequences = 1;
  }

  apu_status create(uint32_t copies) {
    TRY(device_.use());
    TRY(step_.alloc(driver_, kAlign));
    if (!p_.x) return place_weights(copies);
    TRY(in_.alloc(driver_, uint64_t(p_.rows) * p_.k * sizeof(float)));
    TRY(out_.alloc(driver_, uint64_t(p_.rows) * p_.n * sizeof(float)));
    const StepCounts counts{p_.rows, 1, p_.rows, 0};
    TRY(driver_.copy_to_device(step_.address(), &counts, sizeof(counts), device_.stream()));
    TRY(driver_.copy_to_device(in_.address(), p_.x, in_.bytes(), device_.stream()));
    TRY(driver_.fill(out_.address(), 0xff, out_.bytes(), device_.stream()));
    TRY(place_weights(copies));

    const bool quantized = cpu::has_quantized_rows(p_.dtype, p_.precision);
    InputDesc input;
    input.in = reinterpret_cast<const float *>(in_.address());
    input.k = p_.k;
    input.max_rows = p_.rows;
    input.floats = !quantized;
    input.quantized = quantized;
    input.fine = quantized && p_.precision == APU_PRECISION_FINE;
    input_ = make_input(*this, input);
    for (const DeviceBuffer &buffer : weights_) {
      Product product;
      product.sides[0].w = matrix_at(buffer);
      product.sides[0].out = reinterpret_cast<float *>(out_.address());
      product.count = 1;
      product.precision = int32_t(p_.precision);
      products_.push_back(p_.rows <= kMatvecRows ? make_matvec(*this, product) : make_gemm(*this, product));
      TRY(outcome());
    }
    for (size_t i = 0; i < size_t(Scratch::count); ++i) {
      TRY(shared_[i].alloc(driver_, std::max(reserved_[i], kAlign)));
      TRY(driver_.fill(shared_[i].address(), 0, shared_[i].bytes(), device_.stream()));
    }
    activations_ = input_->launch(*this, bucket());
    return outcome();
  }

  apu_status multiply(uint32_t copy) {
    if (!p_.x) return read(weights_[copy % weights_.size()]);
    products_[copy % products_.size()]->launch(*this, bucket(), activations_);
    return outcome();
  }

  apu_status result(float *y) {
    TRY(driver_.copy_to_host(y, out_.address(), out_.bytes(), device_.stream()));
    return driver_.stream_wait(device_.stream());
  }

  // Builder
  const PlanInfo &info() const override { return info_; }
  const DriverProps &props() const override { return device_.driver_props(); }
  StepView step() const override {
    StepView view{};
    view.counts = reinterpret_cast<const StepCounts *>(step_.address());
    return view;
  }
  Kernel kernel(const std::string &name, uint32_t dynamic_lds) override {
    Kernel out;
    keep(device_.kernel(name, dynamic_lds, out));
    return out;
  }
  void reserve(Scratch which, uint64_t bytes) override {
    reserved_[size_t(which)] = std::max(reserved_[size_t(which)], bytes);
  }
  float *scratch(int32_t) override { return nullptr; }
  const float *vector(int32_t) override { return nullptr; }
  Matrix matrix(int32_t) override { return {}; }
  PagedState paged(int32_t) override { return {}; }
  const void *constant(const void *data, size_t bytes) override {
    DeviceBuffer &buffer = constants_.emplace_back();
    keep(buffer.alloc(driver_, bytes));
    if (status_ == APU_OK) keep(driver_.copy_to_device(buffer.address(), data, bytes, device_.stream()));
    if (status_ == APU_OK) keep(driver_.stream_wait(device_.stream())); // `data` may go
    return reinterpret_cast<const void *>(buffer.address());
  }

  // Launcher
  void launch_bytes(const Kernel &kernel, Dim grid, uint32_t threads, uint32_t lds, const void *args,
                    size_t bytes) override {
    if (status_ == APU_OK)
      keep(driver_.launch(kernel.function, grid, threads, lds, device_.stream(), args, bytes), kernel.name);
  }
  uint64_t scratch(Scratch which) const override { return shared_[size_t(which)].address(); }

private:
  apu_status read(const DeviceBuffer &matrix) {
    Kernel kernel;
    TRY(device_.kernel("plain_read", 0, kernel));
    const uint64_t bytes = (p_.n - 1) * p_.row_stride + p_.row_bytes;
    const ReadArgs args = read_args(matrix.address() + offset_, bytes, step_.address());
    return driver_.launch(kernel.function, {read_blocks(args)}, kReadThreads, 0, device_.stream(), &args, sizeof(args));
  }
  // The rows as they lie on the host: the first at the same place within 256 bytes, nothing behind the last.
  apu_status place_weights(uint32_t copies) {
    offset_ = kAlign + reinterpret_cast<uintptr_t>(p_.w) % kAlign;
    const uint64_t bytes = (p_.n - 1) * p_.row_stride + p_.row_bytes;
    for (uint32_t i = 0; i < copies; ++i) {
      DeviceBuffer &buffer = weights_.emplace_back();
      TRY(buffer.alloc(driver_, offset_ + bytes + kWeightPadding));
      const uint64_t to = buffer.address() + offset_;
      if (i == 0)
        TRY(driver_.copy_to_device(to, p_.w, bytes, device_.stream()));
      else
        TRY(driver_.copy_on_device(to, weights_[0].address() + offset_, bytes, device_.stream()));
    }
    return APU_OK;
  }
  Matrix matrix_at(const DeviceBuffer &buffer) {
    const Segment segment{buffer.address() + offset_, 0, p_.n, p_.row_stride};
    Matrix m{};
    m.data = reinterpret_cast<const u8 *>(segment.address);
    m.row_stride = p_.row_stride;
    m.segments = static_cast<const Segment *>(constant(&segment, sizeof(segment)));
    m.segment_count = 1;
    m.rows = p_.n;
    m.k = p_.k;
    m.type = p_.dtype;
    return m;
  }
  Bucket bucket() const { return {p_.rows, p_.rows, 0}; }
  void keep(apu_status status, const char *kernel = nullptr) {
    if (status == APU_OK || status_ != APU_OK) return;
    status_ = status;
    text_ = (kernel ? std::string("kernel ") + kernel + ": " : std::string()) + error_text();
  }
  apu_status outcome() const { return status_ == APU_OK ? APU_OK : fail(status_, "%s", text_.c_str()); }

  Device &device_;
  Driver &driver_;
  const KernelProduct p_;
  PlanInfo info_;
  DeviceBuffer step_, in_, out_;
  std::vector<DeviceBuffer> weights_, constants_;
  uint64_t offset_ = 0; // of a matrix in its buffer
  uint64_t reserved_[size_t(Scratch::count)] = {};
  DeviceBuffer shared_[size_t(Scratch::count)];
  std::unique_ptr<InputKernels> input_;
  std::vector<std::unique_ptr<ProductKernels>> products_;
  Activations activations_{};
  apu_status status_ = APU_OK;
  std::string text_;
};

// Milliseconds of what `enqueue` puts on the stream, the median of `repeats` after one that is not counted.
template <typename Enqueue> apu_status time(Device &device, uint32_t repeats, Enqueue enqueue, std::vector<float> &ms) {
  Driver &driver = device.driver();
  TimedEvent begin(driver), end(driver);
  TRY(begin.create());
  TRY(end.create());
  for (uint32_t r = 0; r <= repeats; ++r) {
    TRY(driver.event_record(begin.event, device.stream()));
    TRY(enqueue());
    TRY(driver.event_record(end.event, device.stream()));
    TRY(driver.event_wait(end.event));
    float took = 0;
    TRY(driver.event_elapsed(begin.event, end.event, took));
    if (r) ms.push_back(took);
  }
  std::sort(ms.begin(), ms.end());
  return APU_OK;
}

apu_status check_type(const char *name, uint32_t dtype) {
  if (dtype != APU_F8_E4M3) return APU_OK;
  return fail(APU_E_UNSUPPORTED, "%s: no GPU kernel reads F8_E4M3 yet", name);
}

} // namespace

apu_status Device::kernel_matmul(const KernelProduct &product, float *y) {
  TRY(check_type("apu_kernel_matmul", product.dtype));
  LoneProduct lone(*this, product);
  TRY(lone.create(1));
  TRY(lone.multiply(0));
  return lone.result(y);
}

apu_status Device::kernel_time(const KernelProduct &product, uint32_t count, uint32_t repeats, double &nanoseconds) {
  TRY(check_type("apu_kernel_time", product.dtype));
  LoneProduct lone(*this, product);
  TRY(lone.create(count));
  TRY(driver_->stream_wait(stream_));
  const uint32_t launches = (std::max(count, kGraphLaunches) + count - 1) / count * count;
  Graph graph = nullptr;
  TRY(driver_->capture_begin(stream_));
  apu_status status = APU_OK;
  for (uint32_t i = 0; i < launches && status == APU_OK; ++i) status = lone.multiply(i);
  const std::string reason = error_text();
  const apu_status captured = driver_->capture_end(stream_, graph);
  if (status != APU_OK) {
    if (captured == APU_OK) driver_->graph_destroy(graph);
    return fail(status, "%s", reason.c_str());
  }
  TRY(captured);
  std::vector<float> ms;
  status = time(*this, repeats, [&] { return driver_->graph_launch(graph, stream_); }, ms);
  driver_->graph_destroy(graph);
  TRY(status);
  nanoseconds = double(ms[ms.size() / 2]) * 1e6 / launches;
  return APU_OK;
}

apu_status Device::kernel_read(const void *in, uint64_t bytes, uint32_t repeats, double &gb_per_s) {
  TRY(use());
  DeviceBuffer sink;
  TRY(sink.alloc(*driver_, kAlign));
  const ReadArgs args = read_args(reinterpret_cast<uintptr_t>(in), bytes, sink.address());
  if (args.bytes == 0)
    return fail(APU_E_INVALID, "apu_kernel_read: %llu bytes hold no aligned 16, expected at least 31",
                static_cast<unsigned long long>(bytes));
  if (args.bytes / kReadBlockBytes >= uint64_t(std::numeric_limits<int32_t>::max()))
    return fail(APU_E_INVALID, "apu_kernel_read: %llu bytes are too many for one launch",
                static_cast<unsigned long long>(bytes));
  Kernel kernel;
  TRY(this->kernel("plain_read", 0, kernel));
  std::vector<float> ms;
  TRY(time(
      *this, repeats,
      [&] {
        return driver_->launch(kernel.function, {read_blocks(args)}, kReadThreads, 0, stream_, &args, sizeof(args));
      },
      ms));
  gb_per_s = double(args.bytes) / (double(ms[0]) * 1e6);
  return APU_OK;
}

apu_status Device::kernel_gather(const uint64_t *parts, uint32_t count, uint64_t bytes, uint32_t repeats,
                                 double &gb_per_s) {
  TRY(use());
  // Whole words of each part: the same number of them, whatever its alignment.
  const uint64_t whole = bytes < 31 ? 0 : (bytes - 15) / 16 * 16;
  if (whole == 0 || whole / kReadBlockBytes >= uint64_t(std::numeric_limits<int32_t>::max()))
    return fail(APU_E_INVALID, "apu_kernel_gather: parts of %llu bytes, expected 31 to what one launch reads",
                static_cast<unsigned long long>(bytes));
  std::vector<uint64_t> aligned(parts, parts + count);
  for (uint64_t &part : aligned) part = (part + 15) / 16 * 16;
  DeviceBuffer sink, table;
  TRY(sink.alloc(*driver_, kAlign));
  TRY(table.alloc(*driver_, count * sizeof(uint64_t)));
  TRY(copy(table.address(), reinterpret_cast<uintptr_t>(aligned.data()), count * sizeof(uint64_t), false, true));
  const GatherArgs args{reinterpret_cast<const u64 *>(table.address()), whole, reinterpret_cast<u32 *>(sink.address())};
  const uint32_t blocks = uint32_t((whole + kReadBlockBytes - 1) / kReadBlockBytes);
  Kernel kernel;
  TRY(this->kernel("gather_read", 0, kernel));
  std::vector<float> ms;
  TRY(time(
      *this, repeats,
      [&] { return driver_->launch(kernel.function, {blocks, count}, kReadThreads, 0, stream_, &args, sizeof(args)); },
      ms));
  gb_per_s = double(whole) * count / (double(ms[0]) * 1e6);
  return APU_OK;
}

apu_status Device::kernel_checksum(uint64_t address, uint64_t bytes, uint64_t &out) {
  TRY(use());
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15, kThreadBytes = 64; // at least so many for each thread
  const uint64_t blocks = bytes / (kChecksumThreads * kThreadBytes) + 1;
  const uint32_t grid = uint32_t(std::min<uint64_t>(blocks, kChecksumBlocks));
  Kernel kernel;
  TRY(this->kernel("checksum", 0, kernel));
  DeviceBuffer sums;
  TRY(sums.alloc(*driver_, grid * sizeof(uint64_t)));
  const ChecksumArgs args{address, bytes, reinterpret_cast<u64 *>(sums.address())};
  TRY(driver_->launch(kernel.function, {grid}, kChecksumThreads, 0, stream_, &args, sizeof(args)));
  uint64_t parts[kChecksumBlocks];
  TRY(driver_->copy_to_host(parts, sums.address(), grid * sizeof(uint64_t), stream_));
  TRY(driver_->stream_wait(stream_));
  out = 0;
  for (uint32_t i = 0; i < grid; ++i) out += parts[i] * kFactor;
  return APU_OK;
}

} // namespace apu::gpu
