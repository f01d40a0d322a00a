// The log-probability of every recorded id, shaped as the token ids.
//
// A thread a slot. Where rows may overlap, the slots first hold who owns them: the output itself is
// the only memory there is, and every slot is read and then overwritten by its own thread.
#include "logits_cuda.cuh"

namespace topp {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kNobody = 0xffffffffu;

// Each row claims its slots; the first of several wins. A row is named by its place in its piece.
__global__ void __launch_bounds__(kThreads)
    claim_kernel(const __grid_constant__ Problem problem, uint32_t* claims) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  for (int64_t n = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       n < problem.rows; n += warps) {
    const RowSlots slots = row_slots(problem.support, n);
    if (slots.bad_extent) continue;
    const uint32_t name = static_cast<uint32_t>(n % problem.support.rows_per_piece);
    for (int64_t j = lane; j < slots.count; j += kWarp) atomicMin(&claims[slots.first + j], name);
  }
}

template <typename T>
TOPP_DEVICE float member_value(const Problem& problem, const SavedRows& saved, int64_t slot,
                               int64_t n) {
  const int32_t id = problem.support.token_ids[slot];
  const int32_t status = saved.status[n];
  if (id == -1 || status == kIgnored || status == kEmpty) return negative_infinity();
  if ((status != kScored && status != kMissing) || !is_member_id(id, problem.vocab_size)) {
    return canonical_nan();
  }
  const T* logits = static_cast<const T*>(problem.logits) + row_offset(problem.layout, n);
  const float temperature = problem.temperature[n * problem.temperature_stride];
  const float x = scaled_logit(widen(logits[id * problem.layout.column_stride]), temperature);
  return member_log_prob(x, saved.max[n], log_fixed(saved.sum[n]));
}

// kClaimed: `out` holds claims, of ragged rows; else a piece is a row.
template <typename T, bool kClaimed>
__global__ void __launch_bounds__(kThreads)
    members_kernel(const __grid_constant__ Problem problem, const __grid_constant__ SavedRows saved,
                   int64_t slots, uint32_t* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; slot < slots;
       slot += step) {
    int64_t n = slot / problem.support.capacity;
    bool owned = n < problem.rows;
    if constexpr (kClaimed) {
      const uint32_t name = out[slot];
      n = n * problem.support.rows_per_piece + name;
      owned = name != kNobody;
    }
    const float value = owned ? member_value<T>(problem, saved, slot, n) : negative_infinity();
    out[slot] = bits_of(value);
  }
}

const char* claim(const Problem& problem, uint32_t* claims, int64_t slots, void* stream) {
  // A byte pattern that names nobody in every slot; an output, so it needs no memory of its own.
  if (const char* error = error_text(cudaMemsetAsync(claims, 0xff, static_cast<size_t>(slots) * 4,
                                                     static_cast<cudaStream_t>(stream)))) {
    return error;
  }
  if (problem.rows == 0) return nullptr;
  if (problem.support.rows_per_piece >= kNobody) return "more than 2^32 - 2 rows share their slots";
  const int64_t blocks = (problem.rows + kThreads / kWarp - 1) / (kThreads / kWarp);
  return launch(claim_kernel, blocks, kThreads, 0, stream, problem, claims);
}

}  // namespace

const char* cuda_members(const Problem& problem, const SavedRows& saved, float* log_probs,
                         int device, void* stream) {
  const int64_t slots = slot_count(problem.support);
  if (slots == 0) return nullptr;
  const DeviceScope scope(device);
  if (const char* error = scope.prepare()) return error;
  uint32_t* out = reinterpret_cast<uint32_t*>(log_probs);
  const bool claimed = problem.support.begins != nullptr;
  if (claimed) {
    if (const char* error = claim(problem, out, slots, stream)) return error;
  }
  const int64_t blocks = (slots + kThreads - 1) / kThreads;
  return with_element_type(problem.dtype, [&](auto element) {
    using T = decltype(element);
    return launch(claimed ? members_kernel<T, true> : members_kernel<T, false>, blocks, kThreads, 0,
                  stream, problem, saved, slots, out);
  });
}

template <typename T>
static const char* load_kernels() {
  const char* error = load_kernel(members_kernel<T, true>);
  return error == nullptr ? load_kernel(members_kernel<T, false>) : error;
}

const char* prepare_members() {
  const char* error = load_kernel(claim_kernel);
  if (error == nullptr) error = load_kernels<float>();
  if (error == nullptr) error = load_kernels<Bfloat16>();
  if (error == nullptr) error = load_kernels<Float16>();
  return error;
}

}  // namespace topp
