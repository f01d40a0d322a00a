// Runs a loop over all cores: one pool for JAX and torch, started on first use, safe after fork().
#pragma once

#include <cstdint>

namespace topp {

using RangeFunction = void (*)(void* context, int64_t begin, int64_t end);

// Calls f(context, begin, end) over disjoint ranges that cover [0, count): `grain` long, or one
// range where a single thread would do all. The caller works too, so calls from several threads at
// once, or from inside another framework's pool, always make progress. Every range runs with
// denormals on and rounding to nearest, whatever the caller has set.
void parallel_for(int64_t count, int64_t grain, RangeFunction f, void* context);

int num_threads();
// At least 1; for tests, and for trainers that pin cores. JAX_TOPP_NUM_THREADS sets the start
// value.
void set_num_threads(int n);

}  // namespace topp
