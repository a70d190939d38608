// Moving pages and slots of states between steps: copy, reset, export and import act on every state of a group, in
// state order. They wait until nothing is pending, so that no step sees half a page.
#include "plan/replay.h"

#include <cstring>

using namespace apu;

namespace {

uint8_t *unit(const State &s, uint32_t index) {
  return reinterpret_cast<uint8_t *>(s.d.address + index * s.unit_bytes());
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
    return fail(APU_E_INVALID, "%s: expected %llu bytes for group %u, found %llu", call, (unsigned long long)need,
                group, (unsigned long long)bytes);
  return APU_OK;
}

} // namespace

apu_status apu_state_copy(apu_plan *plan, uint32_t group, uint32_t from, uint32_t to) {
  if (apu_status s = check_unit("apu_state_copy", plan, group, from); s != APU_OK) return s;
  if (apu_status s = check_unit("apu_state_copy", plan, group, to); s != APU_OK) return s;
  auto lock = plan->wait_idle();
  if (from == to) return APU_OK;
  for (uint32_t i : plan->info.groups[group].states) {
    const State &s = plan->info.states[i];
    std::memcpy(unit(s, to), unit(s, from), s.unit_bytes());
  }
  return APU_OK;
}

apu_status apu_state_reset(apu_plan *plan, uint32_t group, uint32_t page) {
  if (apu_status s = check_unit("apu_state_reset", plan, group, page); s != APU_OK) return s;
  auto lock = plan->wait_idle();
  for (uint32_t i : plan->info.groups[group].states) {
    const State &s = plan->info.states[i];
    std::memset(unit(s, page), 0, s.unit_bytes());
  }
  return APU_OK;
}

apu_status apu_state_export(apu_plan *plan, uint32_t group, uint32_t page, void *out, uint64_t bytes) {
  if (apu_status s = check_unit("apu_state_export", plan, group, page); s != APU_OK) return s;
  if (apu_status s = check_bytes("apu_state_export", *plan, group, out, bytes); s != APU_OK) return s;
  auto lock = plan->wait_idle();
  uint8_t *to = static_cast<uint8_t *>(out);
  for (uint32_t i : plan->info.groups[group].states) {
    const State &s = plan->info.states[i];
    std::memcpy(to, unit(s, page), s.unit_bytes());
    to += s.unit_bytes();
  }
  return APU_OK;
}

apu_status apu_state_import(apu_plan *plan, uint32_t group, uint32_t page, const void *in, uint64_t bytes) {
  if (apu_status s = check_unit("apu_state_import", plan, group, page); s != APU_OK) return s;
  if (apu_status s = check_bytes("apu_state_import", *plan, group, in, bytes); s != APU_OK) return s;
  auto lock = plan->wait_idle();
  const uint8_t *from = static_cast<const uint8_t *>(in);
  for (uint32_t i : plan->info.groups[group].states) {
    const State &s = plan->info.states[i];
    std::memcpy(unit(s, page), from, s.unit_bytes());
    from += s.unit_bytes();
  }
  return APU_OK;
}
