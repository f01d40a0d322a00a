// Row results from logits.
//
// Supports are small and of unequal size (mean 8, median 2, a few of hundreds), so time goes into
// waiting for gathers. Eight lanes take a row of up to 128 slots, four rows a warp, with every
// member in registers; wider rows, and rows over the whole vocabulary, are left to their block.
#include "forward_cuda.cuh"
#include "wide_rows.cuh"

namespace topp {
namespace {

constexpr int kRowLanes = 8;
constexpr int kRowsPerWarp = kWarp / kRowLanes;
constexpr int kRowsPerBlock = kThreads / kRowLanes;
constexpr int kNarrowSlots = 16 * kRowLanes;

// Narrow rows
// -------------------------------------------------------------------------------------------------

struct LaneTeam {
  TOPP_DEVICE unsigned votes(bool vote) {
    const int first = threadIdx.x % kWarp / kRowLanes * kRowLanes;
    return (__ballot_sync(kAllLanes, vote) >> first) & ((1u << kRowLanes) - 1u);
  }
  TOPP_DEVICE bool any(bool vote) { return votes(vote) != 0; }
  TOPP_DEVICE int count(bool vote) { return __popc(votes(vote)); }
};

// The lane's slots, and what the row's lanes see in them.
template <int kHeld>
TOPP_DEVICE RowFacts read_slots(const Problem& problem, const Row& row, int32_t (&id)[kHeld]) {
  const int lane = threadIdx.x % kRowLanes;
  const int count = static_cast<int>(row.slots.count);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int j = i * kRowLanes + lane;
    id[i] = -1;
    if (j < count) id[i] = row.id(problem, j);
  }
  LaneScan scan;
  int32_t last = -1;  // of the eight slots before
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int32_t turned = __shfl_sync(kAllLanes, id[i], lane + kRowLanes - 1, kRowLanes);
    scan.look(id[i], lane == 0 ? last : turned, row.target, problem.vocab_size);
    last = turned;
  }
  return agree<LaneTeam>(scan);
}

// Leaves an id in its first slot only: every slot is shown to the later ones.
template <int kHeld>
TOPP_DEVICE void drop_repeated(int longest, int32_t (&id)[kHeld]) {
  const int lane = threadIdx.x % kRowLanes;
  uint32_t repeated = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i * kRowLanes >= longest) break;
#pragma unroll 1
    for (int l = 0; l < kRowLanes; ++l) {
      const int32_t shown = __shfl_sync(kAllLanes, id[i], l, kRowLanes);
#pragma unroll
      for (int k = i; k < kHeld; ++k) {
        if (id[k] == shown && (k > i || lane > l)) repeated |= 1u << k;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if ((repeated >> k & 1u) != 0) id[k] = -1;
  }
}

// Four at a time: unrolled over all of them, exp would fill the instruction cache.
template <int kHeld>
TOPP_DEVICE RowSums sum_members(int longest, float m, float (&x)[kHeld]) {
  RowSums sums{0, 0};
#pragma unroll 1
  for (int first = 0; first * kRowLanes < longest; first += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((first + i) * kRowLanes < longest) add_member(x[i], m, &sums);
    }
#pragma unroll
    for (int i = 0; i + 4 < kHeld; ++i) x[i] = x[i + 4];
  }
  sums.sum = reduce_lanes<kRowLanes>(sums.sum, Sum{});
  sums.weighted = reduce_lanes<kRowLanes>(sums.weighted, Sum{});
  return sums;
}

// Scores the rows of a warp, none of which has more than kHeld * 8 slots; `longest` is the warp's.
// True: the row is one over the whole vocabulary, and its block's.
template <typename T, int kHeld>
TOPP_DEVICE bool score_narrow(const Problem& problem, const Row& row, int64_t n, int longest,
                              ForwardRow* out) {
  int32_t id[kHeld];
  const RowFacts facts = read_slots(problem, row, id);
  *out = ForwardRow{planned_status(problem, row, facts), 0.0f, 0.0f, {0, 0}};
  const bool full_vocab =
      out->status == kScored && (problem.options & kFullVocab) != 0 && !facts.any_valid;
  const bool scored = out->status == kScored && !full_vocab;
  if (__any_sync(kAllLanes, scored && !facts.distinct)) drop_repeated(longest, id);

  const TargetPlan target = plan_target(problem, facts.has_target);
  const int added_slot = target.added ? static_cast<int>(row.slots.count) : -1;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int j = i * kRowLanes + static_cast<int>(threadIdx.x) % kRowLanes;
    if (j == added_slot) id[i] = row.target;
    if (!scored) id[i] = -1;
  }
  const RowLogits<T> logits = row_logits<T>(problem, row, n);
  T target_raw{};
  if (scored && target.wanted) target_raw = logits.raw(row.target);
  float x[kHeld];
  load_members(logits, id, x);

  int32_t key = kEmptyKey;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) key = Max{}(key, max_key(x[i]));
  key = reduce_lanes<kRowLanes>(key, Max{});
  const bool summed = set_max(key, out) && scored;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!summed) x[i] = negative_infinity();  // adds nothing, while other rows of the warp add up
  }
  out->sums = sum_members(longest, out->max, x);
  if (summed) set_target(target, logits.scale(target_raw), out);
  return full_vocab;
}

// Rows that are left to the block.
struct WideRows {
  int count;
  int64_t rows[kRowsPerBlock];
  __device__ void add(int64_t n) { rows[atomicAdd(&count, 1)] = n; }
};

template <typename T>
TOPP_DEVICE void narrow_rows(const Problem& problem, const ForwardResult& result, int64_t n,
                             WideRows* wide) {
  Row row{};
  row.ignored = true;
  row.target = -1;
  if (n < problem.rows) row = open_row(problem, n);
  const int room = (problem.options & kIncludeMissing) != 0 ? 1 : 0;  // for the target
  bool is_wide = row.slots.count > kNarrowSlots - room;
  if (is_wide) row.slots.count = 0;
  const int longest =
      reduce_lanes<kWarp>(static_cast<int>(row.ignored ? 0 : row.slots.count + room), Max{});
  ForwardRow out;
  if (longest <= 4 * kRowLanes) {
    is_wide |= score_narrow<T, 4>(problem, row, n, longest, &out);
  } else {
    is_wide |= score_narrow<T, 16>(problem, row, n, longest, &out);
  }
  if (threadIdx.x % kRowLanes != 0 || n >= problem.rows) return;
  if (is_wide) {
    wide->add(n);
  } else {
    store_row(out, result, n);
  }
}

// The kernel
// -------------------------------------------------------------------------------------------------

// The bits for wide rows take vocab_size / 8 bytes of shared memory: 19 KB for 151,936 ids let 11
// blocks onto a multiprocessor, 32 KB for 2^18 ids 6, and their registers let 6 on anyway: a second
// kernel for the rows that need them would gain nothing.
template <typename T>
__global__ void __launch_bounds__(kThreads, 6)
    forward_kernel(const __grid_constant__ Problem problem,
                   const __grid_constant__ ForwardResult result) {
  extern __shared__ uint32_t seen_words[];
  __shared__ WideRows wide;
  __shared__ BlockScratch scratch;
  const int64_t turns = (problem.rows + kRowsPerBlock - 1) / kRowsPerBlock;
  for (int64_t turn = blockIdx.x; turn < turns; turn += gridDim.x) {
    // Neighbouring groups of four rows go to different blocks, since wide rows come in runs.
    const int64_t group = static_cast<int64_t>(threadIdx.x / kWarp) * turns + turn;
    const int64_t n = group * kRowsPerWarp + threadIdx.x % kWarp / kRowLanes;
    if (threadIdx.x == 0) wide.count = 0;
    __syncthreads();
    narrow_rows<T>(problem, result, n, &wide);
    __syncthreads();
    for (int w = 0; w < wide.count; ++w) {
      wide_row<T>(problem, result, wide.rows[w], BitSet{seen_words}, &scratch);
    }
    __syncthreads();
  }
}

}  // namespace

const char* cuda_forward(const Problem& problem, const ForwardResult& result, int device,
                         void* stream) {
  if (problem.rows == 0) return nullptr;
  const DeviceScope scope(device);
  if (const char* error = scope.prepare()) return error;
  const int64_t blocks = (problem.rows + kRowsPerBlock - 1) / kRowsPerBlock;
  const int64_t bits = (problem.vocab_size + 31) / 32 * 4;
  return with_element_type(problem.dtype, [&](auto element) {
    return launch(forward_kernel<decltype(element)>, blocks, kThreads, bits, stream, problem,
                  result);
  });
}

const char* prepare_forward() {
  const char* error = load_kernel(forward_kernel<float>);
  if (error == nullptr) error = load_kernel(forward_kernel<Bfloat16>);
  if (error == nullptr) error = load_kernel(forward_kernel<Float16>);
  return error;
}

}  // namespace topp
