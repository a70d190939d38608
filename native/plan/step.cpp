// Checks one step against its plan and copies it, in O(rows + pages): after copy_step() every token, position, page,
// slot and row exists, no page is written twice or read by a sequence while another writes it, and the sampling
// parameters are in range.
#include "common.h"
#include "plan/plan.h"

#include <algorithm>
#include <cmath>

namespace apu {
namespace {

apu_status check_rows(const PlanInfo &plan, const Previous &previous, const apu_step &step) {
  uint32_t covered = 0;
  for (uint32_t s = 0; s < step.sequence_count; ++s) {
    const apu_sequence &q = step.sequences[s];
    if (q.row_count == 0 || q.row_begin >= step.row_count || q.row_count > step.row_count - q.row_begin)
      return fail(APU_E_INVALID, "step: sequence %u has rows %u to %llu, but the step has %u", s, q.row_begin,
                  (unsigned long long)q.row_begin + q.row_count, step.row_count);
    covered += q.row_count; // no overflow: a sequence that overlaps another fails below
    for (uint32_t r = q.row_begin; r < q.row_begin + q.row_count; ++r) {
      const apu_row &row = step.rows[r];
      if (row.sequence != s)
        return fail(APU_E_INVALID, "step: row %u lies in sequence %u but names sequence %u", r, s, row.sequence);
      if (row.position >= plan.max_positions)
        return fail(APU_E_INVALID, "step: row %u is at position %u, expected below %u, the plan's maximum", r,
                    row.position, plan.max_positions);
      if (r > q.row_begin && row.position != step.rows[r - 1].position + 1)
        return fail(APU_E_INVALID, "step: row %u of sequence %u is at position %u, expected %u", r, s, row.position,
                    step.rows[r - 1].position + 1);
      if (row.token == -1) {
        if (row.previous < 0 || size_t(row.previous) >= previous.sampled.size())
          return fail(APU_E_INVALID, "step: row %u takes the token of output %d, but the step before sampled %zu", r,
                      row.previous, previous.sampled.size());
        if (!previous.sampled[size_t(row.previous)])
          return fail(APU_E_INVALID, "step: row %u takes the token of output %d, which did not ask for one", r,
                      row.previous);
      } else if (row.token < 0 || uint32_t(row.token) >= plan.vocabulary) {
        return fail(APU_E_INVALID, "step: row %u has token %d, expected 0 to %u, or -1", r, row.token,
                    plan.vocabulary - 1);
      }
    }
  }
  if (covered != step.row_count)
    return fail(APU_E_INVALID, "step: its sequences hold %u rows, expected %u", covered, step.row_count);
  return APU_OK;
}

// First and last page that the rows of a sequence read or write in a paged group.
std::pair<uint32_t, uint32_t> page_range(const Group &group, const apu_step &step, const apu_sequence &q) {
  uint32_t first = step.rows[q.row_begin].position, last = step.rows[q.row_begin + q.row_count - 1].position;
  uint32_t lowest = group.window && first >= group.window ? first - group.window + 1 : 0;
  return {lowest / kPageTokens, last / kPageTokens};
}

apu_status check_slots(const PlanInfo &plan, const apu_step &step, PageMarks &marks) {
  uint32_t groups = uint32_t(plan.groups.size());
  marks.groups.resize(groups);
  if (++marks.step == 0) { // wrapped: old marks would look new
    for (auto &g : marks.groups) std::fill(g.begin(), g.end(), PageMarks::Mark{});
    marks.step = 1;
  }
  for (uint32_t g = 0; g < groups; ++g) {
    const Group &group = plan.groups[g];
    auto &mark = marks.groups[g];
    mark.resize(group.page_count);
    for (uint32_t s = 0; s < step.sequence_count; ++s) { // what is written
      const apu_slot &slot = step.slots[size_t(s) * groups + g];
      if (group.kind == APU_STATE_FIXED) {
        if (slot.read_slot >= group.page_count || slot.write_slot >= group.page_count)
          return fail(APU_E_INVALID, "step: sequence %u reads slot %u and writes slot %u of group %u, which has %u", s,
                      slot.read_slot, slot.write_slot, g, group.page_count);
        if (mark[slot.write_slot].step == marks.step)
          return fail(APU_E_INVALID, "step: sequences %u and %u both write slot %u of group %u",
                      mark[slot.write_slot].sequence, s, slot.write_slot, g);
        mark[slot.write_slot] = {marks.step, s};
        continue;
      }
      if (slot.page_begin > step.page_count || slot.page_count > step.page_count - slot.page_begin)
        return fail(APU_E_INVALID, "step: pages %u to %llu of sequence %u, group %u, but the step has %u",
                    slot.page_begin, (unsigned long long)slot.page_begin + slot.page_count, s, g, step.page_count);
      const apu_sequence &q = step.sequences[s];
      auto [first, last] = page_range(group, step, q);
      if (last >= slot.page_count)
        return fail(APU_E_INVALID,
                    "step: sequence %u reaches position %u, but its table of group %u has %u pages: expected %u", s,
                    step.rows[q.row_begin + q.row_count - 1].position, g, slot.page_count, last + 1);
      const uint32_t *table = step.pages + slot.page_begin;
      for (uint32_t p = first; p <= last; ++p) {
        if (table[p] == APU_NO_PAGE)
          return fail(APU_E_INVALID, "step: sequence %u needs page %u of group %u, which was freed", s, p, g);
        if (table[p] >= group.page_count)
          return fail(APU_E_INVALID, "step: page %u of sequence %u is %u, but group %u has %u", p, s, table[p], g,
                      group.page_count);
      }
      for (uint32_t p = step.rows[q.row_begin].position / kPageTokens; p <= last; ++p) {
        if (mark[table[p]].step == marks.step)
          return fail(APU_E_INVALID, "step: page %u of group %u is written twice, by sequences %u and %u", table[p], g,
                      mark[table[p]].sequence, s);
        mark[table[p]] = {marks.step, s};
      }
    }
    for (uint32_t s = 0; s < step.sequence_count; ++s) { // what is read
      const apu_slot &slot = step.slots[size_t(s) * groups + g];
      uint32_t single = slot.read_slot;
      const uint32_t *table = group.kind == APU_STATE_FIXED ? &single : step.pages + slot.page_begin;
      auto [first, last] =
          group.kind == APU_STATE_FIXED ? std::pair(0u, 0u) : page_range(group, step, step.sequences[s]);
      for (uint32_t p = first; p <= last; ++p)
        if (mark[table[p]].step == marks.step && mark[table[p]].sequence != s)
          return fail(APU_E_INVALID, "step: sequence %u reads %s %u of group %u, which sequence %u writes", s,
                      group.kind == APU_STATE_FIXED ? "slot" : "page", table[p], g, mark[table[p]].sequence);
    }
  }
  return APU_OK;
}

apu_status check_range(uint32_t output, const char *name, float value, float low, float high) {
  if (!(value >= low && value <= high)) // NaN too
    return fail(APU_E_INVALID, "output %u: %s is %g, expected %g to %g", output, name, double(value), double(low),
                double(high));
  return APU_OK;
}

apu_status check_output(const PlanInfo &plan, const apu_step &step, uint32_t i) {
  const apu_output &o = step.outputs[i];
  if (o.row >= step.row_count)
    return fail(APU_E_INVALID, "output %u: row %u, but the step has %u", i, o.row, step.row_count);
  if (o.want & ~uint32_t(APU_OUT_SAMPLE | APU_OUT_TOP | APU_OUT_LOGITS | APU_OUT_HIDDEN))
    return fail(APU_E_INVALID, "output %u: unknown bits in want, 0x%x", i, o.want);
  struct {
    uint32_t bit;
    const void *pointer;
    const char *name;
  } results[] = {{APU_OUT_SAMPLE, o.token, "token"},
                 {APU_OUT_TOP, o.top_ids, "top_ids"},
                 {APU_OUT_TOP, o.top_logprobs, "top_logprobs"},
                 {APU_OUT_LOGITS, o.logits, "logits"},
                 {APU_OUT_HIDDEN, o.hidden, "hidden"}};
  for (auto &r : results)
    if ((o.want & r.bit) && !r.pointer)
      return fail(APU_E_INVALID, "output %u: %s is NULL, but want asks for it", i, r.name);
  if ((o.want & APU_OUT_TOP) && (o.top_n == 0 || o.top_n > plan.vocabulary))
    return fail(APU_E_INVALID, "output %u: top_n is %u, expected 1 to %u", i, o.top_n, plan.vocabulary);
  if (!(o.want & APU_OUT_SAMPLE)) return APU_OK;
  constexpr float kMost = 3e38f;
  TRY(check_range(i, "temperature", o.temperature, 0, kMost));
  TRY(check_range(i, "top_p", o.top_p, 0, 1));
  TRY(check_range(i, "min_p", o.min_p, 0, 1));
  TRY(check_range(i, "repeat_penalty", o.repeat_penalty, 1e-6f, 1e6f));
  TRY(check_range(i, "frequency_penalty", o.frequency_penalty, -1e6f, 1e6f));
  TRY(check_range(i, "presence_penalty", o.presence_penalty, -1e6f, 1e6f));
  if (o.history_count && (!o.history_ids || !o.history_counts))
    return fail(APU_E_INVALID, "output %u: history_ids or history_counts is NULL, but history_count is %u", i,
                o.history_count);
  if (o.bias_count && (!o.bias_ids || !o.bias_values))
    return fail(APU_E_INVALID, "output %u: bias_ids or bias_values is NULL, but bias_count is %u", i, o.bias_count);
  if (o.history_count > plan.vocabulary || o.bias_count > plan.vocabulary)
    return fail(APU_E_INVALID, "output %u: %u tokens of history and %u biases, expected at most %u", i, o.history_count,
                o.bias_count, plan.vocabulary);
  for (uint32_t h = 0; h < o.history_count; ++h) {
    if (o.history_ids[h] < 0 || uint32_t(o.history_ids[h]) >= plan.vocabulary)
      return fail(APU_E_INVALID, "output %u: token %d in its history, expected 0 to %u", i, o.history_ids[h],
                  plan.vocabulary - 1);
    if (o.history_counts[h] < 1)
      return fail(APU_E_INVALID, "output %u: token %d occurs %d times in its history, expected at least 1", i,
                  o.history_ids[h], o.history_counts[h]);
  }
  for (uint32_t b = 0; b < o.bias_count; ++b) {
    if (o.bias_ids[b] < 0 || uint32_t(o.bias_ids[b]) >= plan.vocabulary)
      return fail(APU_E_INVALID, "output %u: bias for token %d, expected 0 to %u", i, o.bias_ids[b],
                  plan.vocabulary - 1);
    float v = o.bias_values[b];
    if (!(std::isfinite(v) || v == -INFINITY))
      return fail(APU_E_INVALID, "output %u: the bias of token %d is %g, expected a finite number or -inf", i,
                  o.bias_ids[b], double(v));
  }
  return APU_OK;
}

} // namespace

apu_status copy_step(const PlanInfo &plan, const Previous &previous, const apu_step &step, PageMarks &marks,
                     StepCopy &out) {
  uint32_t groups = uint32_t(plan.groups.size());
  if (step.row_count == 0 || step.row_count > plan.max_rows)
    return fail(APU_E_INVALID, "step: %u rows, expected 1 to %u", step.row_count, plan.max_rows);
  if (step.sequence_count == 0 || step.sequence_count > plan.max_sequences)
    return fail(APU_E_INVALID, "step: %u sequences, expected 1 to %u", step.sequence_count, plan.max_sequences);
  if (step.output_count > plan.max_outputs)
    return fail(APU_E_INVALID, "step: %u outputs, expected at most %u", step.output_count, plan.max_outputs);
  if (!step.rows || !step.sequences || (groups && !step.slots) || (step.page_count && !step.pages) ||
      (step.output_count && !step.outputs))
    return fail(APU_E_INVALID, "step: rows, sequences, slots, pages or outputs is NULL, but its count is not 0");
  TRY(check_rows(plan, previous, step));
  TRY(check_slots(plan, step, marks));
  size_t ids = 0, values = 0;
  for (uint32_t i = 0; i < step.output_count; ++i) {
    TRY(check_output(plan, step, i));
    const apu_output &o = step.outputs[i];
    if (!(o.want & APU_OUT_SAMPLE)) continue;
    ids += 2 * size_t(o.history_count) + o.bias_count;
    values += o.bias_count;
  }

  out.groups = groups;
  out.rows.assign(step.rows, step.rows + step.row_count);
  out.sequences.assign(step.sequences, step.sequences + step.sequence_count);
  if (groups) out.slots.assign(step.slots, step.slots + size_t(step.sequence_count) * groups);
  if (step.page_count) out.pages.assign(step.pages, step.pages + step.page_count);
  out.outputs.clear();
  if (step.output_count) out.outputs.assign(step.outputs, step.outputs + step.output_count);
  out.ids.resize(ids);
  out.values.resize(values);
  int32_t *id = out.ids.data();
  float *value = out.values.data();
  for (apu_output &o : out.outputs) {
    if (!(o.want & APU_OUT_SAMPLE)) {
      o.history_count = o.bias_count = 0;
      continue;
    }
    const int32_t *history_counts = o.history_counts;
    std::copy_n(o.history_ids, o.history_count, id);
    o.history_ids = id, id += o.history_count;
    std::copy_n(history_counts, o.history_count, id);
    o.history_counts = id, id += o.history_count;
    std::copy_n(o.bias_ids, o.bias_count, id);
    o.bias_ids = id, id += o.bias_count;
    std::copy_n(o.bias_values, o.bias_count, value);
    o.bias_values = value, value += o.bias_count;
  }
  return APU_OK;
}

} // namespace apu
