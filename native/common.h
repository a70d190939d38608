// The thread-local error text behind apu_last_error(), and the helpers that set it.
//
// Every failing call leaves one sentence that names the tensor or op, what was expected and what was found, and returns
// the status that the caller passes on. The text belongs to the calling thread; an event's error is kept in the event
// and becomes the text of the thread that waits for it.
#pragma once

#include "apu.h"

#include <cstdarg>

namespace apu {

constexpr unsigned kErrorBytes = 1024;

char *error_text(); // the calling thread's buffer, kErrorBytes long

// Formats the text and returns `status`, so that call sites read `return fail(APU_E_INVALID, "...", ...)`.
[[gnu::format(printf, 2, 3)]] apu_status fail(apu_status status, const char *format, ...);
apu_status failv(apu_status status, const char *format, va_list args);

const char *dtype_name(uint32_t dtype); // "Q4_1"; "dtype 99" is written by the caller for unknown numbers ("?")
const char *op_name(uint32_t kind);     // "MATMUL"; "?" when unknown

// Passes a failure on; the error text is set already.
#define TRY(expression)                                                                                                \
  do {                                                                                                                 \
    apu_status try_status = (expression);                                                                              \
    if (try_status != APU_OK) return try_status;                                                                       \
  } while (0)

} // namespace apu
