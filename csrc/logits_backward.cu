// The gradient with respect to the logits, dense.
//
// Writing it is nearly all of the time, so a block takes a row and every byte is written once, in
// whole lines: a bit map of the row's support says which 32-column words hold members; all others
// are zeroed 16 bytes at a time, and a member's thread writes its gradient together with the zeros
// around it. (Zeroing all and scattering afterwards makes the memory read each member's line back.)
// Columns are never zeroed before a member's logit is read, so the gradient may overwrite the
// logits.
#include "logits_cuda.cuh"

namespace topp {
namespace {

constexpr int kThreads = 256;
constexpr int kLine = 128;  // bytes that words of the bit map are aligned to

struct Job {
  Problem problem;
  SavedRows saved;
  Cotangents cotangents;
  GradientView gradient;
  int64_t rows_per_block;
  int64_t words;  // of one bit map
  bool in_place;  // the gradient's memory is the logits', row by row
};

// Which columns of the row hold members: bit `shift + id`, so that a word's columns lie in one
// line.
struct MemberBits {
  BitSet members;
  BitSet repeated;  // ids in more than one slot; only with member cotangents
  int shift;
  int64_t words;
  __device__ uint32_t word(int64_t w) const { return w < words ? members.words[w] : 0; }
};

// Output
// -------------------------------------------------------------------------------------------------

template <typename T>
struct RowOutput {
  T* data;
  int64_t stride;
  int64_t columns;

  __device__ void set(int64_t id, float v) const { narrow(v, &data[id * stride]); }
  __device__ void zero(int64_t column) const { data[column * stride] = T{}; }
  __device__ int shift() const {
    if (stride != 1) return 0;
    return static_cast<int>((reinterpret_cast<uintptr_t>(data) & (kLine - 1)) / sizeof(T));
  }
};

// Zeros every word of columns without a member; kAll: every column.
template <bool kAll, typename T>
TOPP_DEVICE void zero_row(const RowOutput<T>& out, const MemberBits& bits) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  constexpr int kPacksPerWord = 32 / kPack;
  const int shift = out.shift();
  int64_t head = (kPack - shift % kPack) % kPack;
  if (head > out.columns || out.stride != 1) head = out.columns;
  const int64_t packs = (out.columns - head) / kPack;
  uint4* data = reinterpret_cast<uint4*>(out.data + head);
  int word = (static_cast<int>(threadIdx.x) + (static_cast<int>(head) + shift) / kPack) /
             kPacksPerWord;  // of the thread's pack
#pragma unroll 2
  for (int64_t p = threadIdx.x; p < packs; p += kThreads) {
    if (kAll || bits.word(word) == 0) __stcs(&data[p], make_uint4(0, 0, 0, 0));
    word += kThreads / kPacksPerWord;
  }
  const int64_t dense = packs * kPack;
  for (int64_t i = threadIdx.x; i < out.columns - dense; i += kThreads) {
    const int64_t column = i < head ? i : i + dense;
    if (kAll || bits.word((column + shift) >> 5) == 0) out.zero(column);
  }
}

// The word of `id`, if this id is the one that writes the word's zeros: its first member.
struct Neighbours {
  uint32_t word;
  int64_t column;  // of the word's first bit
  int place;       // of the id
  bool mine;
  __device__ Neighbours(const MemberBits& bits, int32_t id) {
    const int64_t bit = static_cast<int64_t>(id) + bits.shift;
    word = bits.members.words[bit >> 5];
    column = (bit & ~int64_t{31}) - bits.shift;
    place = static_cast<int>(bit & 31);
    mine = (word & ((1u << place) - 1u)) == 0;
  }
};

template <typename T>
TOPP_DEVICE void zero_neighbours(const RowOutput<T>& out, const Neighbours& near) {
  if (!near.mine) return;
  for (int b = 0; b < 32; ++b) {
    const int64_t column = near.column + b;
    if ((near.word >> b & 1u) == 0 && column >= 0 && column < out.columns) out.zero(column);
  }
}

// Writes a member's gradient and the zeros of its word, whole lines at once where it is alone.
template <typename T>
TOPP_DEVICE void set_with_neighbours(const RowOutput<T>& out, const MemberBits& bits, int32_t id,
                                     float v) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  const Neighbours near(bits, id);
  const bool alone = (near.word & (near.word - 1)) == 0;
  if (!alone || out.stride != 1 || near.column < 0 || near.column + 32 > out.columns) {
    zero_neighbours(out, near);
    out.set(id, v);
    return;
  }
  T value;
  narrow(v, &value);
  uint32_t raw = 0;
  std::memcpy(&raw, &value, sizeof value);
  const int byte = near.place * static_cast<int>(sizeof(T));
  raw <<= 8 * (byte & 3);
  uint4* line = reinterpret_cast<uint4*>(out.data + near.column);
#pragma unroll
  for (int p = 0; p < 32 / kPack; ++p) {
    const int at = (byte >> 2) - 4 * p;
    line[p] =
        make_uint4(at == 0 ? raw : 0, at == 1 ? raw : 0, at == 2 ? raw : 0, at == 3 ? raw : 0);
  }
}

// Member cotangents
// -------------------------------------------------------------------------------------------------

TOPP_DEVICE bool holds_slots(const SupportView& support, int64_t n) {
  return support.begins[n] >= 0 && support.begins[n] < support.ends[n] &&
         support.ends[n] <= support.capacity;
}

// The member cotangents of row n. Slots that an earlier row of the piece covers carry none.
struct MemberCotangents {
  const Job& job;
  const Row& row;
  int64_t n;
  int64_t first_row;  // of the piece
  bool contested;     // an earlier row covers some of the slots

  __device__ bool owns(int64_t j) const {
    if (row.slots.bad_extent) return false;
    if (!contested) return true;
    const SupportView& support = job.problem.support;
    const int64_t place = support.begins[n] + j;
    for (int64_t m = first_row; m < n; ++m) {
      if (holds_slots(support, m) && support.begins[m] <= place && place < support.ends[m]) {
        return false;
      }
    }
    return true;
  }
  __device__ double at(int64_t j) const {
    if (row.id(job.problem, j) == -1 || !owns(j)) return 0.0;
    return static_cast<double>(job.cotangents.members[row.slots.first + j]);
  }
  // Of every slot that holds the id, in slot order.
  __device__ double total(int32_t id) const {
    double total = 0.0;
    for (int64_t j = 0; j < row.slots.count; ++j) {
      if (row.id(job.problem, j) == id) total += at(j);
    }
    return total;
  }
  // By one warp, in the order of LaneSum.
  __device__ double sum() const {
    double sum = 0.0;
#pragma unroll 4
    for (int64_t j = threadIdx.x % kWarp; j < row.slots.count; j += kWarp) sum += at(j);
    return reduce_lanes<kWarp>(sum, Sum{});
  }
};

struct BlockScratch {
  int32_t reach[kThreads / kWarp];
  RowGradient gradient;  // of the row at hand: in registers, it would halve the blocks that fit
};

// Tells whether earlier rows of a piece cover a row's slots. Rows that stand one behind the other
// only need how far those before reach, which a block carries from row to row; looking at all
// earlier rows is left for the first row of a block and for rows out of order.
class SlotOwners {
 public:
  __device__ SlotOwners(const SupportView& support, BlockScratch* scratch)
      : support_(support), scratch_(scratch) {}

  // By the whole block, for rows in ascending order; `first_row` is the piece's.
  __device__ bool contested(int64_t n, int64_t first_row, bool first_of_block) {
    if (support_.begins == nullptr) return false;
    if (first_of_block) {
      reach_ = reach_before(n, first_row);
    } else if (n == first_row) {
      reach_ = 0;
    }
    if (!holds_slots(support_, n)) return false;
    const bool behind = support_.begins[n] >= reach_;
    if (reach_ < support_.ends[n]) reach_ = support_.ends[n];
    return !behind && overlaps(n, first_row);
  }

 private:
  __device__ int32_t reach_before(int64_t n, int64_t first_row) const {
    int32_t reach = 0;
#pragma unroll 4
    for (int64_t m = first_row + threadIdx.x; m < n; m += kThreads) {
      if (holds_slots(support_, m)) reach = Max{}(reach, support_.ends[m]);
    }
    return reduce_block<kThreads>(reach, Max{}, scratch_->reach);
  }

  __device__ bool overlaps(int64_t n, int64_t first_row) const {
    const int32_t begin = support_.begins[n];
    const int32_t end = support_.ends[n];
    bool found = false;
#pragma unroll 4
    for (int64_t m = first_row + threadIdx.x; m < n; m += kThreads) {
      found |= holds_slots(support_, m) && support_.begins[m] < end && support_.ends[m] > begin;
    }
    return __syncthreads_or(found) != 0;
  }

  const SupportView& support_;
  BlockScratch* scratch_;
  int32_t reach_ = 0;
};

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
