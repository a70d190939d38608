// How these headers' functions and tables are declared. They are plain C++ for the host; device code defines the three
// macros before it includes them (native/gpu/kernels/unpack.h), so that both compile the same text.
#ifndef APU_QUANT_TARGET_H
#define APU_QUANT_TARGET_H

#ifndef APU_QUANT_FUNCTION
#include <string.h>
#define APU_QUANT_FUNCTION static inline
#define APU_QUANT_TABLE inline      // then constexpr: tables that are indexed at run time
#define APU_QUANT_COPY_BYTES memcpy // (to, from, constant size)
#endif

#endif // APU_QUANT_TARGET_H
