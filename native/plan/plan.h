// What apu_plan_create and apu_plan_submit make of their arguments once everything in them has been checked.
//
// PlanInfo is the copied, resolved description: any backend can replay it, and nothing after it checks again. StepCopy
// is the same for one step. Both checks live in validate.cpp and step.cpp and know no device.
#pragma once

#include "apu.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace apu {

constexpr uint32_t kPageTokens = 128;         // that a page spans in every paged state
constexpr uint32_t kMaxRows = 1 << 16;        // of a step
constexpr uint32_t kMaxMatrixRows = 1u << 24; // and columns, and elements of a row of scratch
// The workers number units of work with 25 bits: heads of all rows, their experts, the sampler's chunks of 4096 logits.
constexpr uint64_t kMaxRowHeads = 1u << 24;
constexpr uint64_t kMaxLogits = uint64_t(1) << 36;
constexpr uint32_t kMaxExperts = 1 << 16;

struct Scales { // of a weight; none without segments
  uint32_t dtype = APU_F32;
  uint32_t block_rows = 0, block_columns = 0;
  std::vector<apu_segment> segments; // in rows of the weight, see apu_plane
};

struct Tensor {
  apu_tensor d;
  std::string name;
  uint64_t rows = 0;                 // weights: product of all dimensions but the last; scratch: shape[0]
  uint64_t inner = 0;                // weights: the last dimension; scratch: product of the others
  uint64_t row_bytes = 0;            // weights
  std::vector<apu_segment> segments; // weights, in row order
  Scales scales;                     // weights
  bool is_weight() const { return d.kind == APU_TENSOR_WEIGHT; }
  uint64_t bytes() const { return rows * inner * sizeof(float); } // scratch, I32 too
};

struct State {
  apu_state d;
  std::string name;
  uint64_t row_bytes = 0;       // of one head's row
  uint64_t unit_bytes() const { // of a page, or of a slot with all its versions
    return d.kind == APU_STATE_FIXED ? d.page_bytes * d.versions : d.page_bytes;
  }
  uint8_t *head(uint64_t page, uint32_t index) const { // one head's part of a page
    return reinterpret_cast<uint8_t *>(d.address + page * d.page_bytes + index * d.rows_per_page * row_bytes);
  }
};

struct Group { // states that share page tables or slots
  uint32_t kind = APU_STATE_PAGED;
  uint32_t page_count = 0; // valid in all of them
  uint32_t window = 0;     // the widest of them; 0 = all
  std::vector<uint32_t> states;
};

struct PlanInfo {
  std::vector<Tensor> tensors;
  std::vector<State> states;
  std::vector<Group> groups;
  std::vector<apu_op> ops;
  uint64_t arena_bytes = 0;
  uint32_t max_rows = 0;
  uint32_t max_sequences = 0;
  uint32_t max_outputs = 0;
  uint32_t vocabulary = 0;
  uint32_t max_positions = 0;

  const Tensor *tensor(int32_t id) const { return id == APU_NONE ? nullptr : &tensors[size_t(id)]; }
};

apu_status describe(const apu_plan_desc &desc, PlanInfo &out);

struct StepCopy {
  std::vector<apu_row> rows;
  std::vector<apu_sequence> sequences;
  std::vector<apu_slot> slots; // (sequences, groups)
  std::vector<uint32_t> pages;
  std::vector<apu_output> outputs;
  std::vector<int32_t> ids; // histories and biases of all outputs, which point into these two
  std::vector<float> values;
  uint32_t groups = 0;

  const uint32_t *page_table(uint32_t sequence, uint32_t group) const {
    return pages.data() + slots[size_t(sequence) * groups + group].page_begin;
  }
};

// What the rows of the next step may refer to: `sampled[i]` is 1 where output i asked for a token.
struct Previous {
  std::vector<uint8_t> sampled;
};

// Marks of the pages a step writes, reused from step to step so that a check costs no more than the pages it looks at.
struct PageMarks {
  struct Mark {
    uint32_t step = 0;
    uint32_t sequence = 0;
  };
  std::vector<std::vector<Mark>> groups;
  uint32_t step = 0;
};

apu_status copy_step(const PlanInfo &plan, const Previous &previous, const apu_step &step, PageMarks &marks,
                     StepCopy &out);

} // namespace apu
