// What every generated program begins with.
#pragma once
#include "runtime.h"
#include "vec.h"

// What a kernel is called with: its buffers, the sizes that have names, and memory for its scratch.
struct ox_call { ox_ctx *ctx; void *const *p; const i64 *s; char *scratch; };
