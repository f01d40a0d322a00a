// The gradient with respect to the logits, dense.
//
// Writing it is nearly all of the time, so a block takes a row and every byte is written once, in
// whole lines: a bit map of the row's support says which 32-column words hold members; all others
// are zeroed 16 bytes at a time, and a member's thread writes its gradient together with the zeros
// around it. (Zeroing all and scattering afterwards makes the memory read each member's line back.)
// Columns are never zeroed before a member's logit is read, so the gradient may overwrite the
// logits.
#include "member_cotangents.cuh"
#include "row_output.cuh"

namespace topp {
namespace {

// Rows
// -------------------------------------------------------------------------------------------------

// One look at the slots: facts, member bits, whether an id repeats, whether a cotangent is not 0.
struct SlotsSeen {
  RowFacts facts;
  bool repeats;
  bool asked;
};

template <bool kMembers>
TOPP_DEVICE SlotsSeen see_slots(const Job& job, const Row& row, const MemberCotangents& members,
                                const MemberBits& bits) {
  LaneScan scan;
  bool repeats = false;
  bool asked = false;
  for (int64_t j = threadIdx.x; j < row.slots.count; j += kThreads) {
    const int32_t id = row.id(job.problem, j);
    scan.look(id, j > 0 ? row.id(job.problem, j - 1) : -1, row.target, job.problem.vocab_size);
    if (kMembers) asked |= members.at(j) != 0.0;
    if (!is_member_id(id, job.problem.vocab_size) || bits.members.set(id + bits.shift)) continue;
    repeats = true;
    if (kMembers) bits.repeated.set(id + bits.shift);
  }
  SlotsSeen seen;
  seen.facts = agree<BlockTeam>(scan);
  seen.repeats = !seen.facts.distinct && BlockTeam::any(repeats);
  seen.asked = kMembers && BlockTeam::any(asked);
  return seen;
}

TOPP_DEVICE bool any_row_cotangent(const Cotangents& cotangents, int64_t n) {
  return cotangents.log_prob[n] != 0.0f || cotangents.logsumexp[n] != 0.0f ||
         cotangents.support_entropy[n] != 0.0f || cotangents.target_logit[n] != 0.0f;
}

// Makes an id a member after the slots were seen.
TOPP_DEVICE void add_bit(const MemberBits& bits, int32_t id) {
  if (threadIdx.x == 0) bits.members.set(id + bits.shift);
  __syncthreads();
}

// A row that could not be scored: NaN at every member in range, if anybody asks for its gradient.
template <typename T>
TOPP_DEVICE void bad_row(const Job& job, const Row& row, int32_t status, const SlotsSeen& seen,
                         int64_t n, const MemberBits& bits, const RowOutput<T>& out) {
  const int64_t vocab_size = job.problem.vocab_size;
  if (!seen.asked && !any_row_cotangent(job.cotangents, n)) return zero_row<true>(out, bits);
  if ((job.problem.options & kFullVocab) != 0 && !seen.facts.any_valid && status != kBadSupport) {
    for (int64_t c = threadIdx.x; c < out.columns; c += kThreads) {
      out.set(c, c < vocab_size ? canonical_nan() : 0.0f);
    }
    return;
  }
  const bool with_target =
      (job.problem.options & kIncludeMissing) != 0 && is_member_id(row.target, vocab_size);
  if (with_target) add_bit(bits, row.target);
  zero_row<false>(out, bits);
  const int64_t end = row.slots.count + (with_target ? 1 : 0);
  for (int64_t j = threadIdx.x; j < end; j += kThreads) {
    const int32_t id = j < row.slots.count ? row.id(job.problem, j) : row.target;
    if (is_member_id(id, vocab_size)) set_with_neighbours(out, bits, id, canonical_nan());
  }
}

// By the last warp, which in most rows has no slot to look at; the block's next barrier shares it.
template <bool kMembers>
TOPP_DEVICE void share_gradient(const Job& job, const MemberCotangents& members, bool scored,
                                BlockScratch* scratch) {
  if (threadIdx.x < kThreads - kWarp) return;
  const double sum = kMembers ? members.sum() : 0.0;
  if (threadIdx.x != kThreads - 1) return;
  const Cotangents& given = job.cotangents;
  const int64_t n = members.n;
  scratch->gradient =
      begin_gradient(job.saved.max[n], {job.saved.sum[n], job.saved.weighted_sum[n]},
                     members.row.temperature, scored ? given.log_prob[n] : 0.0, given.logsumexp[n],
                     given.support_entropy[n], scored ? given.target_logit[n] : 0.0, sum);
}

// Every id is a member. A thread reads the columns it then writes, several at a time.
template <typename T>
TOPP_DEVICE void full_vocab_row(const RowGradient& gradient, const RowLogits<T>& logits,
                                int64_t vocab_size, int32_t target, const RowOutput<T>& out) {
  constexpr int kHeld = 4;
  for (int64_t base = threadIdx.x; base < out.columns; base += kHeld * kThreads) {
    float x[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t id = base + i * kThreads;
      x[i] = id < vocab_size ? logits[id] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t id = base + i * kThreads;
      if (id < vocab_size) {
        out.set(id, member_gradient(gradient, x[i], id == target, 0.0));
      } else if (id < out.columns) {
        out.zero(id);
      }
    }
  }
}

// What the gradient of each slot of a scored row takes.
template <typename T, bool kMembers>
struct ScoredSlots {
  const Job& job;
  const Row& row;
  const MemberCotangents& members;
  const SlotsSeen& seen;
  MemberBits bits;
  RowOutput<T> out;
  int32_t target;
  bool added;  // the target joins, in a slot behind the last

  __device__ int64_t end() const { return row.slots.count + (added ? 1 : 0); }
  __device__ int32_t id(int64_t j) const {
    const int32_t id = j < row.slots.count ? row.id(job.problem, j) : target;
    return is_member_id(id, job.problem.vocab_size) ? id : -1;
  }
  __device__ double cotangent(int64_t j, int32_t id) const {
    if (!kMembers || j == row.slots.count) return 0.0;
    if (seen.facts.distinct) return members.at(j);
    if (bits.repeated.has(id + bits.shift)) return members.total(id);
    return 0.0 + members.at(j);  // a total, as where ids repeat: never -0
  }

  // Threads with one id write the same value, unless the first to write replaces the logit that the
  // others are to read: then the one that clears the id's bit writes.
  __device__ void write(const RowGradient& gradient, const RowLogits<T>& logits) const {
    const bool one_writes = seen.repeats && job.in_place;
    if (one_writes) {
      for (int64_t j = threadIdx.x; j < end(); j += kThreads) {
        if (id(j) >= 0) zero_neighbours(out, Neighbours(bits, id(j)));
      }
      __syncthreads();
    }
    for (int64_t j = threadIdx.x; j < end(); j += kThreads) {
      const int32_t member = id(j);
      if (member < 0 || (one_writes && !bits.members.clear(member + bits.shift))) continue;
      const float v =
          member_gradient(gradient, logits[member], member == target, cotangent(j, member));
      if (one_writes) {
        out.set(member, v);
      } else {
        set_with_neighbours(out, bits, member, v);
      }
    }
  }
};

template <typename T, bool kMembers>
TOPP_DEVICE void scored_row(const Job& job, const MemberCotangents& members, const SlotsSeen& seen,
                            const RowGradient& gradient, const MemberBits& bits,
                            const RowOutput<T>& out) {
  const int32_t options = job.problem.options;
  const int32_t target = (options & kNoTarget) != 0 ? -1 : members.row.target;
  const RowLogits<T> logits = row_logits<T>(job.problem, members.row, members.n);
  if ((options & kFullVocab) != 0 && !seen.facts.any_valid) {
    return full_vocab_row(gradient, logits, job.problem.vocab_size, target, out);
  }
  const bool added = !seen.facts.has_target && (options & kIncludeMissing) != 0 &&
                     is_member_id(target, job.problem.vocab_size);
  if (added) add_bit(bits, target);
  zero_row<false>(out, bits);
  const ScoredSlots<T, kMembers> slots{job, members.row, members, seen, bits, out, target, added};
  slots.write(gradient, logits);
}

template <typename T, bool kMembers>
TOPP_DEVICE void backward_row(const Job& job, int64_t n, int64_t first_row, bool contested,
                              uint32_t* words, BlockScratch* scratch) {
  const GradientView& view = job.gradient;
  const RowOutput<T> out{static_cast<T*>(view.data) + row_offset(view.layout, n),
                         view.layout.column_stride, job.problem.columns};
  const MemberBits bits{{words}, {words + job.words}, out.shift(), job.words};
  const int32_t status = job.saved.status[n];
  const Row row = open_row(job.problem, n);
  if (status == kIgnored || status == kEmpty) return zero_row<true>(out, bits);
  __syncthreads();  // the bits and the gradient of the row before are done with
  clear_words<kThreads>(words, kMembers ? 2 * job.words : job.words);
  const MemberCotangents members{job, row, n, first_row, contested};
  const bool is_scored = status == kScored || status == kMissing;
  if (is_scored) share_gradient<kMembers>(job, members, status == kScored, scratch);
  const SlotsSeen seen = see_slots<kMembers>(job, row, members, bits);
  if (is_scored) {
    scored_row<T, kMembers>(job, members, seen, scratch->gradient, bits, out);
  } else {
    bad_row(job, row, status, seen, n, bits, out);
  }
}

// The kernel
// -------------------------------------------------------------------------------------------------

template <typename T, bool kMembers>
__global__ void __launch_bounds__(kThreads, kMembers ? 3 : 4)
    backward_kernel(const __grid_constant__ Job job) {
  extern __shared__ uint32_t member_words[];
  __shared__ BlockScratch scratch;
  const int64_t per_block = job.rows_per_block;
  const int64_t per_piece = job.problem.support.rows_per_piece;
  for (int64_t start = blockIdx.x * per_block; start < job.problem.rows;
       start += gridDim.x * per_block) {
    SlotOwners owners(job.problem.support, &scratch);
    for (int64_t n = start; n < start + per_block && n < job.problem.rows; ++n) {
      const int64_t first_row = kMembers ? n / per_piece * per_piece : 0;
      const bool contested = kMembers && owners.contested(n, first_row, n == start);
      backward_row<T, kMembers>(job, n, first_row, contested, member_words, &scratch);
    }
  }
}

// Words of a bit map: the row may start anywhere in a line.
int64_t bit_words(int64_t vocab_size, int64_t element_bytes) {
  return (vocab_size + kLine / element_bytes + 31) / 32;
}

template <typename T>
const char* launch_backward(Job job, void* stream) {
  const bool with_members = job.cotangents.members != nullptr;
  job.words = bit_words(job.problem.vocab_size, sizeof(T));
  // Finding who owns a slot, a block first looks at all rows before its own: then blocks take runs
  // of rows, so that this costs 2,048 looks at the extents and not one a row.
  const bool ragged = job.problem.support.begins != nullptr;
  job.rows_per_block = with_members && ragged ? (job.problem.rows + 2047) / 2048 : 1;
  const int64_t blocks = (job.problem.rows + job.rows_per_block - 1) / job.rows_per_block;
  return launch(with_members ? backward_kernel<T, true> : backward_kernel<T, false>, blocks,
                kThreads, job.words * 4 * (with_members ? 2 : 1), stream, job);
}

template <typename T>
const char* load_kernels() {
  if (const char* error = load_kernel(backward_kernel<T, false>)) return error;
  // Two bit maps of 2^18 ids are more than a kernel gets unasked.
  return error_text(
      cudaFuncSetAttribute(backward_kernel<T, true>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(8 * bit_words(kMaxVocabSize, sizeof(T)))));
}

}  // namespace

const char* cuda_backward(const Problem& problem, const SavedRows& saved,
                          const Cotangents& cotangents, const GradientView& gradient, int device,
                          void* stream) {
  if (problem.rows == 0 || problem.columns == 0) return nullptr;
  const DeviceScope scope(device);
  if (const char* error = scope.prepare()) return error;
  const Job job{problem, saved, cotangents, gradient, 1, 0, gradient.data == problem.logits};
  return with_element_type(
      problem.dtype, [&](auto element) { return launch_backward<decltype(element)>(job, stream); });
}

const char* prepare_backward() {
  const char* error = load_kernels<float>();
  if (error == nullptr) error = load_kernels<Bfloat16>();
  if (error == nullptr) error = load_kernels<Float16>();
  return error;
}

}  // namespace topp
