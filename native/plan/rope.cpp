#include "plan/rope.h"

#include <algorithm>
#include <cmath>

namespace apu {

std::vector<double> rope_frequencies(const apu_op &op, const float *factors) {
  std::vector<double> out;
  double dims = op.i[0], base = op.f[1], scale = op.f[2], mix = op.f[3];
  auto turns_at = [&](double turns) { // the dimension that turns so often over the original context
    return dims * std::log(op.i[2] / (turns * 2 * M_PI)) / (2 * std::log(base));
  };
  double low = 0, high = 0;
  if (mix > 0) {
    low = turns_at(op.f[5]), high = turns_at(op.f[6]);
    if (!op.i[4]) low = std::floor(low), high = std::ceil(high);
    low = std::max(0.0, low), high = std::min(dims - 1, high);
    if (high - low < 0.001) high = low + 0.001;
  }
  for (int i = 0; i < op.i[0] / 2; ++i) {
    double own = std::pow(base, -2.0 * i / dims) / (factors ? double(factors[i]) : 1.0), f = own * scale;
    if (mix > 0) {
      double kept = (1 - std::clamp((i - low) / (high - low), 0.0, 1.0)) * mix; // share of the unscaled frequency
      f = f * (1 - kept) + own * kept;
    }
    out.push_back(f);
  }
  return out;
}

} // namespace apu
