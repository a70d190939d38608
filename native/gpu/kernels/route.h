// Arguments of the router's kernels (route.hip), for host and device.
#pragma once

#include "rows.h"

namespace apu::gpu {

constexpr u32 kRouteThreads = 256;
constexpr u32 kRouteTile = 1024;     // experts that are ranked at once, where there are many
constexpr u32 kRouteWaveItems = 8;   // experts of a lane, where a wave holds all
constexpr u32 kRouteGroups = 256;    // at most, of experts
constexpr u32 kRouteManyRows = 8;    // rows of a block of route_scores_many
constexpr u32 kRouteManyExperts = 4; // experts of a wave there

struct RouteArgs {
  RowCount count;
  Matrix router;     // (E, D)
  const float *in;   // (T, D)
  const float *norm; // (D) or null
  float *scores;     // (T, E) products
  i32 *ids;          // (T, k) ascending in each row
  float *weights;    // (T, k)
  u32 *counters;     // (T) of blocks that ended a row, or null: route_choose follows
  float eps;
  u32 parts; // of an expert's columns, each a wave's sum: a power of two, at most a block's waves
  u32 share; // waves that have an expert's parts, a divisor of `parts`; route_scores_f32_many, route_scores_f16_many
  u32 k;
  u32 score;  // APU_SCORE_*
  u32 divide; // by their sum, or `floor` if that is more
  float scale, floor;
  const float *added; // (E) to the products, or null
  const float *bias;  // (E) added for the choice alone, or null
  u32 groups;         // of experts that lie together, of which a row chooses among the best; 0: among all
  u32 groups_used;
  u32 group_sum2;     // a group's score is its two best added, else its best
  Matrix table;       // (V, k) I32: experts of each token, of which a row takes its own; no data: it chooses
  const Row *tokens;  // (T) of the step
  const i32 *sampled; // as in StepView
};

} // namespace apu::gpu
