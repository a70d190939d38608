// Which matvec kernel a matrix takes and how its rows are spread over the device: shared by make_matvec and
// make_expert_matvec.
#pragma once

#include "gpu/driver.h"

namespace apu::gpu {

struct MatvecKind {
  const char *name;  // of the kernels: matvec_<name>_r1 ..., expert_matvec_<name>
  uint32_t set;      // rows of the matrix that a wave computes at once
  uint32_t elements; // of a block, and its bytes, of kernels that stage rows; else 0
  uint32_t bytes;
  bool floats;       // reads Activations::x, not the quantised rows
  uint32_t columns;  // of a lane in a slice
  bool held = false; // kHeld of the kernels' Format
};

// For a type and APU_PRECISION_*. Types without kernels of their own are of one kind ("any"), and so are all quantised
// types in precision "exact".
MatvecKind matvec_kind(const DriverProps &props, uint32_t type, int32_t precision);

constexpr uint32_t kMatvecSumBytes = 12 << 10; // of LDS, at most, while there is more than one step

// LDS of a block's staged rows.
uint32_t matvec_image_bytes(const MatvecKind &kind, const DriverProps &props);

struct MatvecGeometry {
  uint32_t slices, splits, steps; // as in MatvecArgs
  uint32_t block_rows;            // rows of the matrix (pairs of rows) that a block computes
  uint32_t threads;
  uint32_t lds; // dynamic bytes
};

// `rows` are all rows that the launch covers, of all its matrices (of one matrix of a pair); r activation rows.
MatvecGeometry matvec_geometry(const MatvecKind &kind, const DriverProps &props, uint32_t k, uint64_t rows, uint32_t r,
                               bool pair);

// The kernels' row count for `rows` rows of `terms` terms each.
uint32_t matvec_rows(uint32_t rows, uint32_t terms);

} // namespace apu::gpu
