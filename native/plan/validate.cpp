// Checks a plan description and copies it: after describe() no index, shape, dtype, extent or alias is wrong, and
// nothing later checks them again. Messages name the op or tensor, what was expected and what was found. Tensors and
// states are checked here, ops in validate_ops.cpp.
#include "plan/op_check.h"

#include <algorithm>

namespace apu {
namespace {

bool read_name(const apu_plan_desc &desc, uint64_t offset, std::string &out) {
  if (offset >= desc.names_bytes) return false;
  out = desc.names + offset; // the block ends in NUL
  return true;
}

// The rows of a plane in its segments: `row_bytes` each, one for `block_rows` rows of the weight.
apu_status check_segments(const apu_plan_desc &desc, const apu_plane &plane, const Tensor &t, uint64_t row_bytes,
                          uint64_t block_rows, std::vector<apu_segment> &out) {
  const char *name = t.name.c_str();
  if (plane.segment_begin > desc.segment_count || plane.segment_count > desc.segment_count - plane.segment_begin)
    return fail(APU_E_INVALID, "tensor \"%s\": segments %u to %llu, but there are %u", name, plane.segment_begin,
                u64(plane.segment_begin) + plane.segment_count, desc.segment_count);
  uint64_t next = 0;
  for (uint32_t i = 0; i < plane.segment_count; ++i) {
    const apu_segment &s = desc.segments[plane.segment_begin + i];
    if (s.row_begin != next)
      return fail(APU_E_INVALID, "tensor \"%s\": segment %u begins at row %llu, expected %llu: segments must adjoin",
                  name, i, u64(s.row_begin), u64(next));
    if (s.row_count == 0 || s.row_count > t.rows - next)
      return fail(APU_E_INVALID, "tensor \"%s\": segment %u has %llu rows, expected 1 to %llu", name, i,
                  u64(s.row_count), u64(t.rows - next));
    if (s.address == 0) return fail(APU_E_INVALID, "tensor \"%s\": segment %u has address 0", name, i);
    const uint64_t count = (s.row_count - 1) / block_rows + 1;
    if (count > 1 && s.row_stride < row_bytes)
      return fail(APU_E_INVALID, "tensor \"%s\": segment %u has rows of %llu bytes at a stride of %llu", name, i,
                  u64(row_bytes), u64(s.row_stride));
    uint64_t extent;
    if (__builtin_mul_overflow(count - 1, s.row_stride, &extent) ||
        __builtin_add_overflow(extent, row_bytes, &extent) || __builtin_add_overflow(extent, s.address, &extent))
      return fail(APU_E_INVALID, "tensor \"%s\": segment %u wraps around the address space", name, i);
    next += s.row_count;
    out.push_back(s);
    out.back().row_stride = std::max(s.row_stride, row_bytes); // a single row may come without one
  }
  if (next != t.rows)
    return fail(APU_E_INVALID, "tensor \"%s\": its segments hold %llu rows, expected %llu", name, u64(next),
                u64(t.rows));
  return APU_OK;
}

apu_status check_scales(const apu_plan_desc &desc, const apu_plane &plane, Tensor &t) {
  const char *name = t.name.c_str();
  if (plane.kind != APU_PLANE_SCALE)
    return fail(APU_E_UNSUPPORTED, "tensor \"%s\": second plane of kind %u, expected scales", name, plane.kind);
  if (t.d.dtype != APU_F8_E4M3)
    return fail(APU_E_UNSUPPORTED, "tensor \"%s\": %s takes no scale plane", name, dtype_name(t.d.dtype));
  if (plane.dtype != APU_F32 && plane.dtype != APU_F16 && plane.dtype != APU_BF16)
    return fail(APU_E_UNSUPPORTED, "tensor \"%s\": scales of dtype %s (%u), expected F32, F16 or BF16", name,
                dtype_name(plane.dtype), plane.dtype);
  if (plane.block_rows == 0 || plane.block_columns == 0)
    return fail(APU_E_INVALID, "tensor \"%s\": scales of blocks of %u x %u, expected at least 1 x 1", name,
                plane.block_rows, plane.block_columns);
  t.scales = {plane.dtype, plane.block_rows, plane.block_columns, {}};
  const uint64_t row_bytes = cpu::row_bytes(plane.dtype, (t.inner - 1) / plane.block_columns + 1);
  return check_segments(desc, plane, t, row_bytes, plane.block_rows, t.scales.segments);
}

apu_status check_tensor(const apu_plan_desc &desc, uint32_t index, Tensor &t) {
  if (!read_name(desc, t.d.name, t.name))
    return fail(APU_E_INVALID, "tensor %u: its name is at %llu of %llu bytes of names", index, u64(t.d.name),
                u64(desc.names_bytes));
  const char *name = t.name.c_str();
  if (t.d.ndim < 1 || t.d.ndim > 4)
    return fail(APU_E_INVALID, "tensor \"%s\": %u dimensions, expected 1 to 4", name, t.d.ndim);
  uint64_t elements = 1;
  for (uint32_t i = 0; i < t.d.ndim; ++i) {
    // Below 2^44 so that byte counts of any dtype cannot overflow.
    if (t.d.shape[i] == 0 || __builtin_mul_overflow(elements, t.d.shape[i], &elements) || elements >> 44)
      return fail(APU_E_INVALID, "tensor \"%s\": shape %s is empty or too large", name, dims(t.d).c_str());
  }
  switch (t.d.kind) {
  case APU_TENSOR_WEIGHT: {
    t.inner = t.d.shape[t.d.ndim - 1];
    t.rows = elements / t.inner;
    t.row_bytes = cpu::row_bytes(t.d.dtype, t.inner);
    if (t.row_bytes == 0) {
      if (*dtype_name(t.d.dtype) == '?')
        return fail(APU_E_UNSUPPORTED, "tensor \"%s\": dtype %u is not supported", name, t.d.dtype);
      return fail(APU_E_UNSUPPORTED, "tensor \"%s\": rows of %llu elements are not whole blocks of %s", name,
                  u64(t.inner), dtype_name(t.d.dtype));
    }
    if (t.d.plane_count != 1 && t.d.plane_count != 2)
      return fail(APU_E_UNSUPPORTED, "tensor \"%s\": %u planes, expected 1 or 2", name, t.d.plane_count);
    if (t.d.plane_begin >= desc.plane_count || t.d.plane_count > desc.plane_count - t.d.plane_begin)
      return fail(APU_E_INVALID, "tensor \"%s\": plane %llu, but there are %u", name,
                  u64(t.d.plane_begin) + t.d.plane_count - 1, desc.plane_count);
    const apu_plane &plane = desc.planes[t.d.plane_begin];
    if (plane.kind != APU_PLANE_DATA)
      return fail(APU_E_UNSUPPORTED, "tensor \"%s\": plane of kind %u, expected data", name, plane.kind);
    if (plane.dtype != t.d.dtype)
      return fail(APU_E_INVALID, "tensor \"%s\": its plane is %s, expected %s", name, dtype_name(plane.dtype),
                  dtype_name(t.d.dtype));
    TRY(check_segments(desc, plane, t, t.row_bytes, 1, t.segments));
    return t.d.plane_count == 2 ? check_scales(desc, (&plane)[1], t) : APU_OK;
  }
  case APU_TENSOR_SCRATCH:
  case APU_TENSOR_BOUNDARY: {
    t.rows = t.d.shape[0];
    t.inner = elements / t.rows;
    if (t.d.dtype != APU_F32 && t.d.dtype != APU_I32)
      return fail(APU_E_INVALID, "tensor \"%s\": scratch of dtype %s (%u), expected F32 or I32", name,
                  dtype_name(t.d.dtype), t.d.dtype);
    if (t.d.rows > APU_ROWS_OUTPUT)
      return fail(APU_E_INVALID, "tensor \"%s\": unknown kind of rows %u", name, t.d.rows);
    uint64_t needed = t.d.rows == APU_ROWS_STEP ? desc.max_rows : t.d.rows == APU_ROWS_OUTPUT ? desc.max_outputs : 0;
    if (needed && t.rows != needed)
      return fail(APU_E_INVALID, "tensor \"%s\" %s: expected %llu rows, the plan's maximum", name, dims(t.d).c_str(),
                  u64(needed));
    if (t.rows > kMaxRows || t.inner > kMaxMatrixRows)
      return fail(APU_E_INVALID, "tensor \"%s\" %s: expected at most %u rows of %u elements", name, dims(t.d).c_str(),
                  kMaxRows, kMaxMatrixRows);
    if (t.d.offset % 64 != 0)
      return fail(APU_E_INVALID, "tensor \"%s\": offset %llu is not a multiple of 64", name, u64(t.d.offset));
    if (t.d.offset > desc.arena_bytes || t.bytes() > desc.arena_bytes - t.d.offset)
      return fail(APU_E_INVALID, "tensor \"%s\": %llu bytes at %llu do not fit into the arena of %llu bytes", name,
                  u64(t.bytes()), u64(t.d.offset), u64(desc.arena_bytes));
    return APU_OK;
  }
  default: return fail(APU_E_INVALID, "tensor \"%s\": unknown kind %u", name, t.d.kind);
  }
}

apu_status check_state(const apu_plan_desc &desc, uint32_t index, State &s, std::vector<Group> &groups) {
  if (!read_name(desc, s.d.name, s.name))
    return fail(APU_E_INVALID, "state %u: its name is at %llu of %llu bytes of names", index, u64(s.d.name),
                u64(desc.names_bytes));
  const char *name = s.name.c_str();
  if (s.d.kind > APU_STATE_FIXED) return fail(APU_E_INVALID, "state \"%s\": unknown kind %u", name, s.d.kind);
  if (s.d.group >= desc.group_count)
    return fail(APU_E_INVALID, "state \"%s\": group %u, but there are %u", name, s.d.group, desc.group_count);
  if (*dtype_name(s.d.dtype) == '?')
    return fail(APU_E_UNSUPPORTED, "state \"%s\": dtype %u is not supported", name, s.d.dtype);
  if (s.d.heads == 0 || s.d.head_size == 0 || s.d.page_count == 0)
    return fail(APU_E_INVALID, "state \"%s\": %u heads of %u elements in %u pages: expected at least 1 of each", name,
                s.d.heads, s.d.head_size, s.d.page_count);
  s.row_bytes = cpu::row_bytes(s.d.dtype, s.d.head_size);
  if (s.row_bytes == 0)
    return fail(APU_E_UNSUPPORTED, "state \"%s\": heads of %u elements are not whole blocks of %s", name, s.d.head_size,
                dtype_name(s.d.dtype));
  uint64_t rows = 1;
  if (s.d.kind == APU_STATE_PAGED) {
    rows = s.d.rows_per_page;
    if (rows == 0 || rows > kPageTokens || kPageTokens % rows != 0)
      return fail(APU_E_INVALID, "state \"%s\": %u rows a page, expected a divisor of %u", name, s.d.rows_per_page,
                  kPageTokens);
  } else if (s.d.versions == 0) {
    return fail(APU_E_INVALID, "state \"%s\": 0 versions, expected at least 1", name);
  }
  uint64_t need, extent;
  if (__builtin_mul_overflow(s.d.heads * rows, s.row_bytes, &need) || s.d.page_bytes < need)
    return fail(APU_E_INVALID, "state \"%s\": pages of %llu bytes, expected at least %llu", name, u64(s.d.page_bytes),
                u64(need));
  const uint64_t element = cpu::is_quantized(s.d.dtype) ? 2 : cpu::row_bytes(s.d.dtype, 1); // a block's scale
  if (s.d.page_bytes % element != 0 || s.d.address % element != 0 || s.d.address == 0)
    return fail(APU_E_INVALID, "state \"%s\": address %llx or page size %llu is 0 or no multiple of %llu", name,
                u64(s.d.address), u64(s.d.page_bytes), u64(element));
  uint64_t units = uint64_t(s.d.page_count) * (s.d.kind == APU_STATE_FIXED ? s.d.versions : 1);
  if (__builtin_mul_overflow(units, s.d.page_bytes, &extent) || __builtin_add_overflow(extent, s.d.address, &extent))
    return fail(APU_E_INVALID, "state \"%s\": its pages wrap around the address space", name);
  Group &g = groups[s.d.group];
  if (!g.states.empty() && g.kind != s.d.kind)
    return fail(APU_E_INVALID, "state \"%s\": group %u mixes paged and fixed states", name, s.d.group);
  bool first = g.states.empty();
  g.kind = s.d.kind;
  g.page_count = first ? s.d.page_count : std::min(g.page_count, s.d.page_count);
  g.window = first ? s.d.window : g.window == 0 || s.d.window == 0 ? 0 : std::max(g.window, s.d.window);
  g.states.push_back(index);
  return APU_OK;
}

} // namespace

apu_status describe(const apu_plan_desc &desc, PlanInfo &out) {
  struct {
    const char *name;
    const void *pointer;
    uint64_t count;
  } arrays[] = {
      {"tensors", desc.tensors, desc.tensor_count},
      {"planes", desc.planes, desc.plane_count},
      {"segments", desc.segments, desc.segment_count},
      {"states", desc.states, desc.state_count},
      {"ops", desc.ops, desc.op_count},
      {"names", desc.names, desc.names_bytes},
  };
  for (auto &a : arrays)
    if (a.count && !a.pointer)
      return fail(APU_E_INVALID, "plan: %s is NULL, but its count is %llu", a.name, u64(a.count));
  if (desc.names_bytes && desc.names[desc.names_bytes - 1] != 0)
    return fail(APU_E_INVALID, "plan: names does not end in NUL");
  if (desc.max_rows == 0 || desc.max_rows > kMaxRows)
    return fail(APU_E_INVALID, "plan: max_rows is %u, expected 1 to %u", desc.max_rows, kMaxRows);
  if (desc.max_sequences == 0 || desc.max_sequences > desc.max_rows)
    return fail(APU_E_INVALID, "plan: max_sequences is %u, expected 1 to max_rows (%u)", desc.max_sequences,
                desc.max_rows);
  if (desc.max_outputs > kMaxRows)
    return fail(APU_E_INVALID, "plan: max_outputs is %u, expected at most %u", desc.max_outputs, kMaxRows);
  if (desc.vocabulary == 0 || desc.vocabulary > uint32_t(INT32_MAX))
    return fail(APU_E_INVALID, "plan: vocabulary is %u, expected 1 to %d", desc.vocabulary, INT32_MAX);
  if (desc.max_positions == 0 || desc.max_positions > uint32_t(INT32_MAX))
    return fail(APU_E_INVALID, "plan: max_positions is %u, expected 1 to %d", desc.max_positions, INT32_MAX);
  if (desc.group_count > desc.state_count)
    return fail(APU_E_INVALID, "plan: %u groups of %u states", desc.group_count, desc.state_count);
  if (desc.op_count == 0) return fail(APU_E_INVALID, "plan: it has no ops");
  if (desc.flags & ~uint32_t(APU_PLAN_NO_GRAPH)) return fail(APU_E_INVALID, "plan: unknown flags, 0x%x", desc.flags);
  if (desc.arena_bytes >> 46) return fail(APU_E_INVALID, "plan: an arena of %llu bytes", u64(desc.arena_bytes));

  out.arena_bytes = desc.arena_bytes;
  out.max_rows = desc.max_rows, out.max_sequences = desc.max_sequences, out.max_outputs = desc.max_outputs;
  out.vocabulary = desc.vocabulary, out.max_positions = desc.max_positions;
  out.tensors.resize(desc.tensor_count);
  for (uint32_t i = 0; i < desc.tensor_count; ++i) {
    out.tensors[i].d = desc.tensors[i];
    TRY(check_tensor(desc, i, out.tensors[i]));
  }
  out.states.resize(desc.state_count);
  out.groups.resize(desc.group_count);
  for (uint32_t i = 0; i < desc.state_count; ++i) {
    out.states[i].d = desc.states[i];
    TRY(check_state(desc, i, out.states[i], out.groups));
  }
  for (uint32_t g = 0; g < desc.group_count; ++g)
    if (out.groups[g].states.empty()) return fail(APU_E_INVALID, "plan: no state is in group %u", g);
  out.ops.assign(desc.ops, desc.ops + desc.op_count);
  for (uint32_t i = 0; i < desc.op_count; ++i) TRY(check_op(out, i));
  return APU_OK;
}

} // namespace apu
