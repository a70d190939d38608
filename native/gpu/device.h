// A GPU as a device: its driver, its properties and the one module of kernels built for it.
#pragma once

#include "gpu/driver.h"
