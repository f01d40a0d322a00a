// What the front ends ask of the kernels: plain structs, and one entry point a call for each
// platform.
#pragma once

#include <cstdint>

namespace topp {

enum class DType : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

enum Status : int32_t {
  kScored = 0,
  kIgnored = 1,
  kEmpty = 2,
  kMissing = 3,
  kBadSupport = 4,
  kBadTarget = 5,
  kBadTemperature = 6,
  kNotFinite = 7,
};

// Bits of Problem::options; jax_topp/contract.py has the same values.
enum Option : int32_t {
  kIncludeMissing = 1,  // missing="include": score over S + {y}
  kFullVocab = 2,       // empty="full_vocab": a row without a member is scored over all ids
  kNoTarget = 4,        // targets only say which rows are ignored
  kPadded = 8,          // FFI only: the token ids are [..., K], and there are no extents
};

constexpr int64_t kMaxVocabSize = int64_t{1} << 18;
constexpr int kMaxRank = 4;

// Where row n of a strided array starts: n unfolds over shape[0 .. rank), row-major; strides count
// elements.
struct RowLayout {
  int32_t rank;
  int64_t shape[kMaxRank];
  int64_t stride[kMaxRank];
  int64_t column_stride;
};

// Rows n = piece * rows_per_piece + r; a piece has `capacity` slots. begins == nullptr: padded, one
// row a piece.
struct SupportView {
  const int32_t* token_ids;
  const int32_t* begins;
  const int32_t* ends;
  int64_t capacity;
  int64_t rows_per_piece;
  int64_t pieces;  // not rows / rows_per_piece: a piece may have slots and no row
};

struct Problem {
  DType dtype;
  const void* logits;
  RowLayout layout;
  int64_t rows;
  int64_t columns;     // of the logits; the gradient writes them all
  int64_t vocab_size;  // ids at or above it do not exist; at most `columns`
  SupportView support;
  const int32_t* targets;  // [rows]; negative: the row is ignored
  const float* temperature;
  int64_t temperature_stride;  // 1: one a row; 0: one for all
  int32_t options;
};

// Row results; max, sum and weighted_sum are what the backward needs.
struct ForwardResult {
  float* log_prob;
  float* logsumexp;
  float* support_entropy;
  float* target_logit;
  int32_t* status;
  float* max;
  int64_t* sum;
  int64_t* weighted_sum;
};

struct SavedRows {
  const int32_t* status;
  const float* max;
  const int64_t* sum;
  const int64_t* weighted_sum;
};

// All [rows]; `members` is shaped as the token ids, or nullptr.
struct Cotangents {
  const float* log_prob;
  const float* logsumexp;
  const float* support_entropy;
  const float* target_logit;
  const float* members;
};

struct GradientView {
  void* data;  // may be the logits themselves
  RowLayout layout;
};

struct CpuKernels {
  void (*forward)(const Problem&, const ForwardResult&);
  void (*members)(const Problem&, const SavedRows&, float* log_probs);
  void (*backward)(const Problem&, const SavedRows&, const Cotangents&, const GradientView&);
  uint64_t (*arithmetic_hash)();
  const char* name;
};

// The kernels for this processor: x86-64-v3 where it can run, or what JAX_TOPP_CPU asks for.
const CpuKernels& cpu_kernels();
// Both builds, for tests that compare them; nullptr where this processor or build has no such one.
const CpuKernels* cpu_kernels_named(const char* name);

// CUDA. Launchers return nullptr, or what went wrong; they neither synchronise nor allocate. In a
// build without CUDA they answer with how to get it.
const char* cuda_forward(const Problem&, const ForwardResult&, int device, void* stream);
const char* cuda_members(const Problem&, const SavedRows&, float* log_probs, int device,
                         void* stream);
const char* cuda_backward(const Problem&, const SavedRows&, const Cotangents&, const GradientView&,
                          int device, void* stream);
bool cuda_built();
// nullptr when a CUDA device can run the kernels, else why not.
const char* cuda_unavailable();
// The arithmetic's hash as device 0 computes it (synchronises); nullptr, or what went wrong.
const char* cuda_arithmetic_hash(uint64_t* hash);

}  // namespace topp
