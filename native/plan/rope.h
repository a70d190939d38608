// Frequencies of rotary embeddings, the same for all backends.
//
// YaRN (arXiv 2309.00071) interpolates the frequencies of the dimensions that turn rarely over the original context and
// keeps those that turn often.
#pragma once

#include "apu.h"

#include <vector>

namespace apu {

// Of the pairs of a ROPE_STORE op, in radians for each position; factors (pairs), which divide them, or null.
std::vector<double> rope_frequencies(const apu_op &op, const float *factors);

} // namespace apu
