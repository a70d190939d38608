// The parts of the contract that have no object behind them: version, error text, names, and the struct layout that
// apu_engine/_native compares with its own at import, so that a stale library is refused instead of misread.
#include "common.h"

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

namespace apu {

char *error_text() {
  static thread_local char text[kErrorBytes];
  return text;
}

apu_status failv(apu_status status, const char *format, va_list args) {
  std::vsnprintf(error_text(), kErrorBytes, format, args);
  return status;
}

apu_status fail(apu_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  failv(status, format, args);
  va_end(args);
  return status;
}

const char *dtype_name(uint32_t dtype) {
  switch (dtype) {
  case APU_F32: return "F32";
  case APU_F16: return "F16";
  case APU_Q4_0: return "Q4_0";
  case APU_Q4_1: return "Q4_1";
  case APU_Q5_0: return "Q5_0";
  case APU_Q5_1: return "Q5_1";
  case APU_Q8_0: return "Q8_0";
  case APU_Q2_K: return "Q2_K";
  case APU_Q3_K: return "Q3_K";
  case APU_Q4_K: return "Q4_K";
  case APU_Q5_K: return "Q5_K";
  case APU_Q6_K: return "Q6_K";
  case APU_IQ2_XXS: return "IQ2_XXS";
  case APU_IQ2_XS: return "IQ2_XS";
  case APU_IQ3_XXS: return "IQ3_XXS";
  case APU_IQ1_S: return "IQ1_S";
  case APU_IQ4_NL: return "IQ4_NL";
  case APU_IQ3_S: return "IQ3_S";
  case APU_IQ2_S: return "IQ2_S";
  case APU_IQ4_XS: return "IQ4_XS";
  case APU_IQ1_M: return "IQ1_M";
  case APU_TQ1_0: return "TQ1_0";
  case APU_TQ2_0: return "TQ2_0";
  case APU_MXFP4: return "MXFP4";
  case APU_NVFP4: return "NVFP4";
  case APU_F8_E4M3: return "F8_E4M3";
  case APU_I32: return "I32";
  case APU_BF16: return "BF16";
  default: return "?";
  }
}

const char *op_name(uint32_t kind) {
  switch (kind) {
  case APU_OP_EMBED: return "EMBED";
  case APU_OP_RMS_NORM: return "RMS_NORM";
  case APU_OP_MATMUL: return "MATMUL";
  case APU_OP_ROPE_STORE: return "ROPE_STORE";
  case APU_OP_ATTENTION: return "ATTENTION";
  case APU_OP_GATHER_NORM: return "GATHER_NORM";
  case APU_OP_SAMPLE: return "SAMPLE";
  case APU_OP_ROUTE: return "ROUTE";
  case APU_OP_EXPERTS: return "EXPERTS";
  case APU_OP_LATENT_STORE: return "LATENT_STORE";
  case APU_OP_HEAD_MATMUL: return "HEAD_MATMUL";
  case APU_OP_LATENT_ATTENTION: return "LATENT_ATTENTION";
  case APU_OP_STREAMS_IN: return "STREAMS_IN";
  case APU_OP_STREAMS_OUT: return "STREAMS_OUT";
  case APU_OP_SHARED_STORE: return "SHARED_STORE";
  case APU_OP_COMPRESS: return "COMPRESS";
  case APU_OP_INDEX: return "INDEX";
  case APU_OP_SPARSE_ATTENTION: return "SPARSE_ATTENTION";
  default: return "?";
  }
}

namespace {

struct Layout {
  std::string text;
  void begin(const char *name, size_t size) {
    if (!text.empty()) text += '\n';
    text += name;
    add(size);
  }
  void add(size_t value) {
    text += ' ';
    text += std::to_string(value);
  }
};

std::string make_layout() {
  Layout out;
#define S(type) out.begin(#type, sizeof(type))
#define F(type, field) out.add(offsetof(type, field))
  S(apu_device_options);
  F(apu_device_options, threads), F(apu_device_options, isa), F(apu_device_options, pin);
  F(apu_device_options, spin_us), F(apu_device_options, kernels), F(apu_device_options, runtime);
  S(apu_device_props);
  F(apu_device_props, kind), F(apu_device_props, name), F(apu_device_props, arch), F(apu_device_props, integrated);
  F(apu_device_props, threads), F(apu_device_props, isa), F(apu_device_props, wave_size);
  F(apu_device_props, pageable), F(apu_device_props, ways);
  F(apu_device_props, memory_bytes), F(apu_device_props, driver_version);
  S(apu_chunk);
  F(apu_chunk, host), F(apu_chunk, device), F(apu_chunk, bytes);
  S(apu_region_info);
  F(apu_region_info, strategy), F(apu_region_info, way), F(apu_region_info, grain), F(apu_region_info, reserved);
  F(apu_region_info, device_bytes), F(apu_region_info, pinned_bytes);
  S(apu_stager_info);
  F(apu_stager_info, direct_bytes), F(apu_stager_info, plain_bytes), F(apu_stager_info, pinned_bytes);
  S(apu_segment);
  F(apu_segment, address), F(apu_segment, row_begin), F(apu_segment, row_count), F(apu_segment, row_stride);
  F(apu_segment, padding);
  S(apu_plane);
  F(apu_plane, kind), F(apu_plane, dtype), F(apu_plane, segment_begin), F(apu_plane, segment_count);
  F(apu_plane, block_rows), F(apu_plane, block_columns);
  S(apu_tensor);
  F(apu_tensor, kind), F(apu_tensor, dtype), F(apu_tensor, rows), F(apu_tensor, ndim), F(apu_tensor, shape);
  F(apu_tensor, plane_begin), F(apu_tensor, plane_count), F(apu_tensor, offset), F(apu_tensor, name);
  S(apu_state);
  F(apu_state, kind), F(apu_state, dtype), F(apu_state, layer), F(apu_state, group), F(apu_state, rows_per_page);
  F(apu_state, window), F(apu_state, heads), F(apu_state, head_size), F(apu_state, address);
  F(apu_state, page_bytes), F(apu_state, page_count), F(apu_state, versions), F(apu_state, name);
  S(apu_op);
  F(apu_op, kind), F(apu_op, layer), F(apu_op, in), F(apu_op, out), F(apu_op, w), F(apu_op, state), F(apu_op, i);
  F(apu_op, f);
  S(apu_plan_desc);
  F(apu_plan_desc, tensors), F(apu_plan_desc, planes), F(apu_plan_desc, segments), F(apu_plan_desc, states);
  F(apu_plan_desc, ops), F(apu_plan_desc, names), F(apu_plan_desc, names_bytes), F(apu_plan_desc, tensor_count);
  F(apu_plan_desc, plane_count), F(apu_plan_desc, segment_count), F(apu_plan_desc, state_count);
  F(apu_plan_desc, op_count), F(apu_plan_desc, group_count), F(apu_plan_desc, arena_bytes);
  F(apu_plan_desc, max_rows), F(apu_plan_desc, max_sequences), F(apu_plan_desc, max_outputs);
  F(apu_plan_desc, vocabulary), F(apu_plan_desc, max_positions), F(apu_plan_desc, flags);
  S(apu_row);
  F(apu_row, token), F(apu_row, previous), F(apu_row, position), F(apu_row, sequence);
  S(apu_sequence);
  F(apu_sequence, row_begin), F(apu_sequence, row_count);
  S(apu_slot);
  F(apu_slot, page_begin), F(apu_slot, page_count), F(apu_slot, read_slot), F(apu_slot, write_slot);
  S(apu_output);
  F(apu_output, row), F(apu_output, want), F(apu_output, temperature), F(apu_output, top_k), F(apu_output, top_p);
  F(apu_output, min_p), F(apu_output, repeat_penalty), F(apu_output, frequency_penalty);
  F(apu_output, presence_penalty), F(apu_output, top_n), F(apu_output, seed), F(apu_output, draw);
  F(apu_output, history_count), F(apu_output, bias_count), F(apu_output, reserved), F(apu_output, history_ids);
  F(apu_output, history_counts), F(apu_output, bias_ids), F(apu_output, bias_values), F(apu_output, mask);
  F(apu_output, token), F(apu_output, logprob), F(apu_output, top_ids), F(apu_output, top_logprobs);
  F(apu_output, logits), F(apu_output, hidden);
  S(apu_step);
  F(apu_step, rows), F(apu_step, sequences), F(apu_step, slots), F(apu_step, pages), F(apu_step, outputs);
  F(apu_step, row_count), F(apu_step, sequence_count), F(apu_step, page_count), F(apu_step, output_count);
#undef S
#undef F
  return out.text + "\n";
}

} // namespace
} // namespace apu

uint32_t apu_abi_version(void) {
  return APU_ABI_VERSION;
}

const char *apu_last_error(void) {
  return apu::error_text();
}

const char *apu_abi_layout(void) {
  static const std::string text = apu::make_layout();
  return text.c_str();
}
