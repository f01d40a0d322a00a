// What the CUDA kernels share: a row's facts, loads of its members, reductions, launching.
//
// The kernels give the bits of the CPU ones. All floating-point work is exact.h's; what is reduced
// across lanes is integers, whose sums and maxima have no order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "contract.h"
#include "exact.h"
#include "support.h"

#define TOPP_DEVICE static __device__ __forceinline__

namespace topp {

// Loads every kernel onto a device (below 0: the current one) and sets its limits; cheap once done.
// Launchers call it; a caller that captures a graph may do so before.
const char* cuda_prepare(int device);
// Each file's share of it, for the current device.
const char* prepare_forward();
const char* prepare_members();
const char* prepare_backward();

// 1. Host: launching
// -------------------------------------------------------------------------------------------------

inline const char* error_text(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Makes a device current and puts back the one that was; below 0 it stays with the current one.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : error_(cudaGetDevice(&before_)) {
    device_ = device < 0 ? before_ : device;
    if (error_ == cudaSuccess && device_ != before_) error_ = cudaSetDevice(device_);
  }
  ~DeviceScope() {
    if (error_ == cudaSuccess && device_ != before_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  int device() const { return device_; }
  // nullptr when the kernels are ready to run here.
  const char* prepare() const {
    return error_ == cudaSuccess ? cuda_prepare(device_) : error_text(error_);
  }

 private:
  int before_ = 0;
  int device_ = 0;
  cudaError_t error_;
};

// The kernels stride over their grid, so a grid at its limit only means more turns.
template <typename... P, typename... A>
const char* launch(void (*kernel)(P...), int64_t blocks, int threads, int64_t shared_bytes,
                   void* stream, const A&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  return error_text(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <typename... P>
const char* load_kernel(void (*kernel)(P...)) {
  cudaFuncAttributes attributes;
  return error_text(cudaFuncGetAttributes(&attributes, kernel));
}

template <typename F>
const char* with_element_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBfloat16:
      return f(Bfloat16{});
    case DType::kFloat16:
      return f(Float16{});
  }
  return "unknown element type";
}

// 2. Lanes and blocks
// -------------------------------------------------------------------------------------------------

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Max {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};

// Over groups of kWidth neighbouring lanes; every lane of the warp takes part and gets its group's
// result.
template <int kWidth, typename V, typename Op>
TOPP_DEVICE V reduce_lanes(V v, Op op) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    v = op(v, __shfl_xor_sync(kAllLanes, v, distance));
  }
  return v;
}

// Over a block; `partial` is shared memory for one value a warp.
template <int kThreads, typename V, typename Op>
TOPP_DEVICE V reduce_block(V v, Op op, V* partial) {
  v = reduce_lanes<kWarp>(v, op);
  __syncthreads();  // whoever still reads the last reduction's values
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = partial[0];
#pragma unroll
  for (int w = 1; w < kThreads / kWarp; ++w) v = op(v, partial[w]);
  return v;
}

// A bit an id; the bits live in shared memory.
struct BitSet {
  uint32_t* words;
  // Whether the call changed the bit: of many threads with one id, one gets true.
  __device__ bool set(int64_t i) const {
    const uint32_t bit = 1u << (i & 31);
    return (atomicOr(&words[i >> 5], bit) & bit) == 0;
  }
  __device__ bool clear(int64_t i) const {
    const uint32_t bit = 1u << (i & 31);
    return (atomicAnd(&words[i >> 5], ~bit) & bit) != 0;
  }
  __device__ bool has(int64_t i) const { return (words[i >> 5] >> (i & 31) & 1u) != 0; }
};

template <int kThreads>
TOPP_DEVICE void clear_words(uint32_t* words, int64_t count) {
  for (int64_t w = threadIdx.x; w < count; w += kThreads) words[w] = 0;
  __syncthreads();
}

// 3. Rows
// -------------------------------------------------------------------------------------------------

// What is known of a row before its slots are read.
struct Row {
  bool ignored;  // and without slots
  int32_t target;
  float temperature;
  RowSlots slots;

  // Through the problem's own pointer, which the compiler knows to be global memory.
  __device__ int32_t id(const Problem& problem, int64_t j) const {
    return problem.support.token_ids[slots.first + j];
  }
};

// All loads before the first test: a wait for memory less.
TOPP_DEVICE Row open_row(const Problem& problem, int64_t n) {
  Row row;
  row.target = problem.targets[n];
  row.temperature = problem.temperature[n * problem.temperature_stride];
  row.slots = row_slots(problem.support, n);
  row.ignored = row.target < 0;
  if (row.ignored) row.slots.count = 0;
  return row;
}

// scan_slots() by many lanes: each looks at some of the slots and at the one before each.
struct LaneScan {
  bool bad_id = false;
  bool unordered = false;
  bool has_target = false;
  int runs = 0;  // of valid slots, counted where they start

  __device__ void look(int32_t id, int32_t before, int32_t target, int64_t vocab_size) {
    bad_id |= id < -1 || id >= vocab_size;
    has_target |= id == target;
    if (id < 0) return;
    unordered |= id <= before;
    runs += before < 0;
  }
};

struct RowFacts {
  bool bad_id;
  bool distinct;  // as in SlotScan
  bool has_target;
  bool any_valid;
};

// The lanes' votes become a row's facts; `Team` says who votes.
template <typename Team>
TOPP_DEVICE RowFacts agree(const LaneScan& scan) {
  RowFacts facts;
  facts.bad_id = Team::any(scan.bad_id);
  facts.has_target = Team::any(scan.has_target);
  const bool unordered = Team::any(scan.unordered || scan.runs > 1);
  const int lanes_with_runs = Team::count(scan.runs > 0);
  facts.any_valid = lanes_with_runs > 0;
  facts.distinct = !unordered && lanes_with_runs <= 1;
  return facts;
}

struct BlockTeam {
  TOPP_DEVICE bool any(bool vote) { return __syncthreads_or(vote) != 0; }
  TOPP_DEVICE int count(bool vote) { return __syncthreads_count(vote); }
};

// The status of a row before its logits are read: kScored, or what is wrong with it.
TOPP_DEVICE int32_t planned_status(const Problem& problem, const Row& row, const RowFacts& facts) {
  if (row.ignored) return kIgnored;
  if (!is_usable_temperature(row.temperature)) return kBadTemperature;
  if (row.slots.bad_extent || facts.bad_id) return kBadSupport;
  if ((problem.options & kNoTarget) == 0 && row.target >= problem.vocab_size) return kBadTarget;
  return kScored;
}

template <typename T>
struct RowLogits {
  const T* data;
  int64_t stride;
  float temperature;
  __device__ T raw(int64_t id) const { return data[id * stride]; }
  __device__ float scale(T v) const { return scaled_logit(widen(v), temperature); }
  __device__ float operator[](int64_t id) const { return scale(raw(id)); }
};

template <typename T>
TOPP_DEVICE RowLogits<T> row_logits(const Problem& problem, const Row& row, int64_t n) {
  return {static_cast<const T*>(problem.logits) + row_offset(problem.layout, n),
          problem.layout.column_stride, row.temperature};
}

// Scaled logits of several ids, -inf for negative ones, which adds nothing to a maximum or a sum.
// All loads are on their way before the first division.
template <typename T, int kCount>
TOPP_DEVICE void load_members(const RowLogits<T>& logits, const int32_t (&id)[kCount],
                              float (&x)[kCount]) {
  T raw[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    raw[i] = T{};
    if (id[i] >= 0) raw[i] = logits.raw(id[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // Lanes without a member divide T by T: a zero would take the division's slow path.
    const float z = id[i] >= 0 ? widen(raw[i]) : logits.temperature;
    const float quotient = scaled_logit(z, logits.temperature);
    x[i] = id[i] >= 0 ? quotient : negative_infinity();
  }
}

}  // namespace topp
