// The contract's calls on plans and events: arguments are checked here, once for all backends. Plans are made by their
// device (device.cpp).
#include "common.h"
#include "cpu/guard.h"
#include "plan/backend.h"

#include <exception>

using namespace apu;

using u64 = unsigned long long;

namespace {

// Runs `body`, whose allocations may fail.
template <typename Body> apu_status guarded(const char *call, Body body) {
  try {
    return body();
  } catch (const std::exception &e) { // bad_alloc, length_error
    return fail(APU_E_MEMORY, "%s: out of memory: %s", call, e.what());
  }
}

apu_status check_unit(const char *call, apu_plan *plan, uint32_t group, uint32_t index) {
  if (!plan) return fail(APU_E_INVALID, "%s: plan must not be NULL", call);
  if (group >= plan->info.groups.size())
    return fail(APU_E_INVALID, "%s: group %u, but the plan has %zu", call, group, plan->info.groups.size());
  const Group &g = plan->info.groups[group];
  if (index >= g.page_count)
    return fail(APU_E_INVALID, "%s: %s %u, but group %u has %u", call, g.kind == APU_STATE_FIXED ? "slot" : "page",
                index, group, g.page_count);
  return APU_OK;
}

apu_status check_bytes(const char *call, const apu_plan &plan, uint32_t group, const void *buffer, uint64_t bytes) {
  uint64_t need = 0;
  for (uint32_t i : plan.info.groups[group].states) need += plan.info.states[i].unit_bytes();
  if (!buffer) return fail(APU_E_INVALID, "%s: the buffer must not be NULL", call);
  if (bytes != need)
    return fail(APU_E_INVALID, "%s: expected %llu bytes for group %u, found %llu", call, u64(need), group, u64(bytes));
  return APU_OK;
}

} // namespace

apu_status apu_plan::take_step(const apu_step &step, bool samples, StepCopy &out) {
  TRY(copy_step(info, previous, step, marks, out));
  if (!samples) return APU_OK;
  previous.sampled.resize(out.outputs.size());
  for (size_t i = 0; i < out.outputs.size(); ++i) previous.sampled[i] = (out.outputs[i].want & APU_OUT_SAMPLE) != 0;
  return APU_OK;
}

apu_status apu_plan::check_read(const Tensor &t, uint32_t step_rows, uint32_t outputs, uint64_t bytes) {
  uint64_t rows = t.d.rows == APU_ROWS_STEP ? step_rows : t.d.rows == APU_ROWS_OUTPUT ? outputs : t.rows;
  uint64_t need = rows * t.inner * sizeof(float);
  if (bytes != need)
    return fail(APU_E_INVALID, "apu_plan_read: \"%s\" holds %llu rows of %llu floats: expected %llu bytes, found %llu",
                t.name.c_str(), u64(rows), u64(t.inner), u64(need), u64(bytes));
  return APU_OK;
}

uint64_t apu_plan_scratch_bytes(apu_plan *plan) {
  return plan ? plan->scratch_bytes() : 0;
}

void apu_plan_destroy(apu_plan *plan) {
  if (!plan) return;
  plan->close();
  delete plan;
}

apu_status apu_plan_submit(apu_plan *plan, const apu_step *step, uint32_t first, uint32_t last, apu_event **out) {
  if (!plan || !step || !out) return fail(APU_E_INVALID, "apu_plan_submit: plan, step and out must not be NULL");
  *out = nullptr;
  if (first > last || last > plan->info.ops.size())
    return fail(APU_E_INVALID, "submit: ops %u to %u, but the plan has %zu", first, last, plan->info.ops.size());
  TRY(check_mappings());
  return guarded("submit", [&] { return plan->submit(*step, first, last, *out); });
}

apu_status apu_event_wait(apu_event *event, int64_t timeout_us) {
  if (!event) return fail(APU_E_INVALID, "apu_event_wait: event must not be NULL");
  return event->wait(timeout_us);
}

apu_status apu_plan_cancel(apu_plan *plan) {
  if (!plan) return fail(APU_E_INVALID, "apu_plan_cancel: plan must not be NULL");
  plan->cancel();
  return APU_OK;
}

apu_status apu_plan_read(apu_plan *plan, uint32_t tensor, void *out, uint64_t bytes) {
  if (!plan || !out) return fail(APU_E_INVALID, "apu_plan_read: plan and out must not be NULL");
  if (tensor >= plan->info.tensors.size())
    return fail(APU_E_INVALID, "apu_plan_read: tensor %u, but the plan has %zu", tensor, plan->info.tensors.size());
  const Tensor &t = plan->info.tensors[tensor];
  if (t.is_weight()) return fail(APU_E_INVALID, "apu_plan_read: \"%s\" is a weight, expected scratch", t.name.c_str());
  return guarded("apu_plan_read", [&] { return plan->read(t, out, bytes); });
}

apu_status apu_plan_profile(apu_plan *plan, uint32_t enable, uint64_t *nanoseconds) {
  if (!plan) return fail(APU_E_INVALID, "apu_plan_profile: plan must not be NULL");
  return guarded("apu_plan_profile", [&] { return plan->profile(enable != 0, nanoseconds); });
}

apu_status apu_state_copy(apu_plan *plan, uint32_t group, uint32_t from, uint32_t to) {
  TRY(check_unit("apu_state_copy", plan, group, from));
  TRY(check_unit("apu_state_copy", plan, group, to));
  if (from == to) return APU_OK;
  return plan->copy_unit(plan->info.groups[group], from, to);
}

apu_status apu_state_reset(apu_plan *plan, uint32_t group, uint32_t page) {
  TRY(check_unit("apu_state_reset", plan, group, page));
  return plan->reset_unit(plan->info.groups[group], page);
}

apu_status apu_state_export(apu_plan *plan, uint32_t group, uint32_t page, void *out, uint64_t bytes) {
  TRY(check_unit("apu_state_export", plan, group, page));
  TRY(check_bytes("apu_state_export", *plan, group, out, bytes));
  return plan->export_unit(plan->info.groups[group], page, static_cast<uint8_t *>(out));
}

apu_status apu_state_import(apu_plan *plan, uint32_t group, uint32_t page, const void *in, uint64_t bytes) {
  TRY(check_unit("apu_state_import", plan, group, page));
  TRY(check_bytes("apu_state_import", *plan, group, in, bytes));
  return plan->import_unit(plan->info.groups[group], page, static_cast<const uint8_t *>(in));
}
