// The arithmetic: every floating-point operation of the library stands in this file
// (docs/numerics.md says why).
//
// g++ and nvcc both compile it. Fused steps are written out as fma(); everything else must stay
// unfused, so the C++ side is built with -ffp-contract=off and the CUDA side with --fmad=false.
// Functions have internal linkage: the CPU kernels are compiled once per instruction set, and a
// shared inline symbol would let the linker mix the two.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TOPP_INLINE static __host__ __device__ __forceinline__
#else
#define TOPP_INLINE static inline __attribute__((always_inline))
#endif

namespace topp {

// 1. Bits
// ------------------------------------------------------------------------------------------------------------

TOPP_INLINE int64_t bits_of(double v) {
  int64_t b;
  std::memcpy(&b, &v, sizeof b);
  return b;
}

TOPP_INLINE double double_of(int64_t b) {
  double v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

TOPP_INLINE uint32_t bits_of(float v) {
  uint32_t b;
  std::memcpy(&b, &v, sizeof b);
  return b;
}

TOPP_INLINE float float_of(uint32_t b) {
  float v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

// One NaN for every backend: x86 makes negative ones, NVIDIA's have every payload bit set.
TOPP_INLINE float canonical_nan() { return float_of(0x7fc00000u); }
TOPP_INLINE float negative_infinity() { return float_of(0xff800000u); }
TOPP_INLINE bool is_nan_or_positive_infinity(float x) {
  const uint32_t b = bits_of(x);
  return b == 0x7f800000u || (b & 0x7fffffffu) > 0x7f800000u;
}

TOPP_INLINE float round_to_float(double v) {
  return v == v ? static_cast<float>(v) : canonical_nan();
}

// 2. Element types of the logits
// ---------------------------------------------------------------------------------------

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

TOPP_INLINE float widen(float v) { return v; }
TOPP_INLINE float widen(Bfloat16 v) { return float_of(static_cast<uint32_t>(v.bits) << 16); }
TOPP_INLINE float widen(Float16 v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  const uint32_t magnitude = v.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  const float tiny = static_cast<float>(magnitude) * 0x1p-24f;  // denormal: exact
  return float_of(sign | bits_of(tiny));
}

// Round to nearest, ties to even; NaN becomes the type's canonical NaN.
TOPP_INLINE void narrow(float v, float* out) { *out = v == v ? v : canonical_nan(); }
TOPP_INLINE void narrow(float v, Bfloat16* out) {
  const uint32_t b = bits_of(v);
  out->bits =
      v == v ? static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16) : uint16_t{0x7fc0u};
}
TOPP_INLINE void narrow(float v, Float16* out) {
  const uint32_t b = bits_of(v);
  const uint32_t sign = (b >> 16) & 0x8000u;
  const uint32_t magnitude = b & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    out->bits = 0x7e00u;
    return;
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14: normal
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // adding 0.5 leaves the denormal's 2^-24 steps in the low bits, rounded to even
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

// 3. exp, log, fixed point
// ---------------------------------------------------------------------------------------------

constexpr double kRoundToInteger =
    6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, ties to even
constexpr double kLn2High = 0x1.62e42fee00000p-1;  // 33 bits, so that n * kLn2High is exact
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kLog2E = 0x1.71547652b82fep+0;
constexpr double kExpFlush = -50.0;  // below it a term is under 2^-72 and adds 0 to the sums
constexpr int kFractionBits = 44;    // 2^18 members of at most 2^44 each stay below 2^63
constexpr double kFixedOne = 17592186044416.0;
constexpr double kFixedUlp = 1.0 / kFixedOne;

TOPP_INLINE double fused(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// x = z / T, IEEE float32: never a multiplication by 1 / T.
TOPP_INLINE float scaled_logit(float z, float temperature) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(z, temperature);
#else
  return z / temperature;
#endif
}

// exp(y) for -50 <= y <= 0: 2^n * (Taylor polynomial of degree 12 in r), y = n ln 2 + r, |r| <=
// ln(2) / 2.
TOPP_INLINE double exp_in_range(double y) {
  const double shifted = y * kLog2E + kRoundToInteger;
  const double n = shifted - kRoundToInteger;
  double r = fused(-n, kLn2High, y);
  r = fused(-n, kLn2Low, r);
  double p = 1.0 / 479001600.0;
  p = fused(p, r, 1.0 / 39916800.0);
  p = fused(p, r, 1.0 / 3628800.0);
  p = fused(p, r, 1.0 / 362880.0);
  p = fused(p, r, 1.0 / 40320.0);
  p = fused(p, r, 1.0 / 5040.0);
  p = fused(p, r, 1.0 / 720.0);
  p = fused(p, r, 1.0 / 120.0);
  p = fused(p, r, 1.0 / 24.0);
  p = fused(p, r, 1.0 / 6.0);
  p = fused(p, r, 0.5);
  p = fused(p, r, 1.0);
  p = fused(p, r, 1.0);
  // The low bits of `shifted` hold n; the shift keeps only the exponent field.
  const uint64_t exponent = static_cast<uint64_t>(bits_of(shifted)) + 1023u;
  return p * double_of(static_cast<int64_t>(exponent << 52));
}

// exp(y) for y <= 0 (-inf allowed); below kExpFlush exactly 0.
TOPP_INLINE double exp_nonpositive(double y) {
  const double clamped = y < kExpFlush ? kExpFlush : y;
  const double t = exp_in_range(clamped);
  return y < kExpFlush ? 0.0 : t;
}

// rint(v * 2^44) for 0 <= v <= 64, by an addition (GPUs convert double to int64 at a quarter of the
// rate).
TOPP_INLINE int64_t to_fixed(double v) {
  return bits_of(v * kFixedOne + kRoundToInteger) - bits_of(kRoundToInteger);
}

// log(sum * 2^-44) for 2^44 <= sum <= 2^62: exponent split around sqrt(2), then 2 atanh(s), s = (f
// - 1) / (f + 1).
TOPP_INLINE double log_fixed(int64_t sum) {
  const double v = static_cast<double>(sum) * kFixedUlp;
  int64_t b = bits_of(v);
  // Subtracting the bits of sqrt(1/2) makes the exponent field count from there: f lands in
  // [sqrt(1/2), sqrt(2)).
  const int64_t k = (b - 0x3fe6a09e667f3bcdLL) >> 52;
  b -= static_cast<int64_t>(static_cast<uint64_t>(k) << 52);
  const double f = double_of(b);
  const double e = static_cast<double>(k);
  const double s = (f - 1.0) / (f + 1.0);
  const double w = s * s;
  double p = 1.0 / 21.0;
  p = fused(p, w, 1.0 / 19.0);
  p = fused(p, w, 1.0 / 17.0);
  p = fused(p, w, 1.0 / 15.0);
  p = fused(p, w, 1.0 / 13.0);
  p = fused(p, w, 1.0 / 11.0);
  p = fused(p, w, 1.0 / 9.0);
  p = fused(p, w, 1.0 / 7.0);
  p = fused(p, w, 1.0 / 5.0);
  p = fused(p, w, 1.0 / 3.0);
  const double twice = s + s;
  const double tail = fused(twice * w, p, e * kLn2Low);
  return fused(e, kLn2High, twice + tail);
}

// 4. One row
// -----------------------------------------------------------------------------------------------------------

// The sums over a row's distinct members, relative to the row's maximum. Integers: any order gives
// the same value.
struct RowSums {
  int64_t sum;       // of t = exp(x - m), in units of 2^-44
  int64_t weighted;  // of t * (m - x), likewise
};

TOPP_INLINE void add_member(float x, float m, RowSums* sums) {
  const double y = static_cast<double>(x) - static_cast<double>(m);
  const double clamped = y < kExpFlush ? kExpFlush : y;  // keeps 0 * inf out of the weighted sum
  const double t = y < kExpFlush ? 0.0 : exp_in_range(clamped);
  sums->sum += to_fixed(t);
  sums->weighted += to_fixed(t * -clamped);
}

struct RowValues {
  float log_prob;
  float logsumexp;
  float support_entropy;
};

TOPP_INLINE float member_log_prob(float x, float m, double log_sum) {
  return round_to_float((static_cast<double>(x) - static_cast<double>(m)) - log_sum);
}

TOPP_INLINE double entropy_of(RowSums sums, double log_sum) {
  return log_sum + static_cast<double>(sums.weighted) / static_cast<double>(sums.sum);
}

TOPP_INLINE RowValues finish_row(float target_logit, float m, RowSums sums) {
  const double log_sum = log_fixed(sums.sum);
  RowValues values;
  values.log_prob = member_log_prob(target_logit, m, log_sum);
  values.logsumexp = round_to_float(static_cast<double>(m) + log_sum);
  values.support_entropy = round_to_float(entropy_of(sums, log_sum));
  return values;
}

// A sum over a row's slots in the order of a warp: lane j % 32 adds its own slots, ascending, then
// the lanes meet at distances of 16, 8, 4, 2 and 1.
struct LaneSum {
  double lanes[32] = {};
  void add(int64_t j, double v) { lanes[j & 31] += v; }
  double total() const {
    double a[32];
    for (int l = 0; l < 32; ++l) a[l] = lanes[l];
    for (int distance = 16; distance > 0; distance /= 2)
      for (int l = 0; l < distance; ++l) a[l] += a[l + distance];
    return a[0];
  }
};

// What a row's gradient needs; cotangents in double. `members` is the sum of the member log-probs'
// cotangents.
struct RowGradient {
  double m, log_sum, entropy;
  double log_prob, support_entropy, target_logit,
      shared;  // shared = logsumexp's cotangent minus `members`
  double temperature;
};

TOPP_INLINE RowGradient begin_gradient(float m, RowSums sums, float temperature, double log_prob,
                                       double logsumexp, double support_entropy,
                                       double target_logit, double members) {
  RowGradient row;
  row.m = static_cast<double>(m);
  row.log_sum = log_fixed(sums.sum);
  row.entropy = entropy_of(sums, row.log_sum);
  row.log_prob = log_prob;
  row.support_entropy = support_entropy;
  row.target_logit = target_logit;
  row.shared = logsumexp - members;
  row.temperature = static_cast<double>(temperature);
  return row;
}

// d loss / d x of one member: `cotangent` is its own log-prob's. In this order, unfused.
TOPP_INLINE double member_dx(const RowGradient& row, float x, bool is_target, double cotangent) {
  const double q = (static_cast<double>(x) - row.m) - row.log_sum;
  const double p = exp_nonpositive(q);
  double dx;
  if (p == 0.0) {  // only the terms with p vanish; q may be -inf and must not meet a product
    dx = (is_target ? row.log_prob : 0.0) + cotangent;
  } else {
    const double a = row.support_entropy * (q + row.entropy);
    dx = row.log_prob * ((is_target ? 1.0 : 0.0) - p) + p * (row.shared - a) + cotangent;
  }
  return is_target ? dx + row.target_logit : dx;
}

TOPP_INLINE float member_gradient(const RowGradient& row, float x, bool is_target,
                                  double cotangent) {
  return round_to_float(member_dx(row, x, is_target, cotangent) / row.temperature);
}

}  // namespace topp
