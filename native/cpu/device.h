// The CPU as a device: the pool of workers and the kernel table of one instruction-set level.
#pragma once

#include "apu.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"

struct apu_device {
  uint32_t isa; // APU_ISA_*
  const apu::cpu::KernelTable *kernels;
  apu::cpu::Pool pool;
};
