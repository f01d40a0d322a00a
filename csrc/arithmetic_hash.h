// A fixed number that every build of the arithmetic must give: checked at import, and on each GPU.
#pragma once

#include "exact.h"

namespace topp {

constexpr uint64_t kArithmeticHash = 0x41f34ee08e846c9cULL;  // of contract 1

namespace hash_detail {

TOPP_INLINE uint64_t
mix(uint64_t h, uint64_t v) {  // FNV-1a over 64-bit words, then a shift to reach the low bits
  h = (h ^ v) * 0x100000001b3ULL;
  return h ^ (h >> 29);
}

TOPP_INLINE uint64_t next(uint64_t* state) {  // Knuth's MMIX generator
  *state = *state * 6364136223846793005ULL + 1442695040888963407ULL;
  return *state >> 11;  // 53 bits
}

TOPP_INLINE double uniform(uint64_t* state) { return static_cast<double>(next(state)) * 0x1p-53; }

}  // namespace hash_detail

// Runs rows of random logits, denormal ones included, through every step: widening, division, exp,
// sums, log, the three values, the gradient, narrowing.
TOPP_INLINE uint64_t arithmetic_hash() {
  using namespace hash_detail;
  uint64_t state = 20260101;
  uint64_t h = 0xcbf29ce484222325ULL;
  for (int row = 0; row < 96; ++row) {
    const float temperature = static_cast<float>(0.05 + 2.0 * uniform(&state));
    const double spread = row % 8 == 0 ? 0x1p-140 : 40.0 * uniform(&state);
    float x[33];
    float m = negative_infinity();
    for (float& value : x) {
      const float z = static_cast<float>((uniform(&state) - 0.5) * spread);
      Bfloat16 b;
      Float16 f;
      narrow(z, &b);
      narrow(z, &f);
      value = scaled_logit(row % 3 == 0 ? z : (row % 3 == 1 ? widen(b) : widen(f)), temperature);
      m = value > m ? value : m;
    }
    RowSums sums{0, 0};
    for (float value : x) add_member(value, m, &sums);
    const RowValues values = finish_row(x[0], m, sums);
    h = mix(h, static_cast<uint64_t>(sums.sum));
    h = mix(h, static_cast<uint64_t>(sums.weighted));
    h = mix(h, bits_of(values.log_prob));
    h = mix(h, bits_of(values.logsumexp));
    h = mix(h, bits_of(values.support_entropy));
    double cotangents[5];
    for (double& value : cotangents) value = uniform(&state) - 0.5;
    const RowGradient gradient = begin_gradient(m, sums, temperature, cotangents[0], cotangents[1],
                                                cotangents[2], cotangents[3], cotangents[4]);
    for (int i = 0; i < 33; ++i) {
      const double cotangent = uniform(&state) - 0.5;
      const float dz = member_gradient(gradient, x[i], i == 0, cotangent);
      Bfloat16 b;
      Float16 f;
      narrow(dz, &b);
      narrow(dz, &f);
      h = mix(h, static_cast<uint64_t>(
                     bits_of(member_dx(gradient, x[i], i == 0, cotangent))));  // shows contraction
      h = mix(h, bits_of(dz));
      h = mix(h, (static_cast<uint64_t>(b.bits) << 16) | f.bits);
    }
  }
  return h;
}

}  // namespace topp
