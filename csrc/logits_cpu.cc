// Replay from logits on the CPU: the reference build of every kernel.
//
// Compiled once per instruction set (TOPP_CPU_VARIANT names the build), so nothing here may have
// external linkage but the table at the end, and no library template that could be merged with
// another build's copy is used.
#include <cstdlib>

#include "arithmetic_hash.h"
#include "contract.h"
#include "exact.h"
#include "parallel.h"
#include "support.h"

#define TOPP_CONCAT_(a, b) a##b
#define TOPP_CONCAT(a, b) TOPP_CONCAT_(a, b)
#define TOPP_STRING_(a) #a
#define TOPP_STRING(a) TOPP_STRING_(a)

namespace topp {
namespace {

constexpr int kBlock = 256;  // members gathered at a time; a typical row fits in one block
constexpr int64_t kSerialCost =
    20000;  // about 20 us of work: below it, waking threads costs more than it saves

// A growing thread-local buffer; memory is the row's, never the vocabulary's times the rows'.
template <typename T>
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  T* get(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = count + count / 2;
      data_ = static_cast<T*>(std::malloc(static_cast<size_t>(capacity_) * sizeof(T)));
      if (data_ == nullptr) std::abort();
    }
    return data_;
  }
  // Zeroed when it grows; the user leaves it zeroed.
  T* get_zeroed(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = count;
      data_ = static_cast<T*>(std::calloc(static_cast<size_t>(capacity_), sizeof(T)));
      if (data_ == nullptr) std::abort();
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

struct ThreadState {
  Scratch<uint64_t> seen;     // a bit a vocabulary id, all clear between rows
  Scratch<double> id_totals;  // a double a vocabulary id, all zero between rows; only for repeated
                              // ids with cotangents
  Scratch<float> gradients;   // one a slot of the row at hand
};

thread_local ThreadState t_state;

// Which ids of the row at hand were met before: ids repeat only where the scan could not rule it
// out.
class SeenIds {
 public:
  SeenIds(bool distinct, int64_t vocab_size)
      : bits_(distinct ? nullptr : t_state.seen.get_zeroed((kMaxVocabSize + 63) / 64)),
        vocab_size_(vocab_size) {}

  bool first_time(int32_t id) {
    if (bits_ == nullptr) return true;
    uint64_t& word = bits_[id >> 6];
    const uint64_t bit = uint64_t{1} << (id & 63);
    const bool fresh = (word & bit) == 0;
    word |= bit;
    return fresh;
  }

  void forget(const RowSlots& slots) {
    if (bits_ == nullptr) return;
    for (int64_t j = 0; j < slots.count; ++j) {
      if (is_member_id(slots.ids[j], vocab_size_)) bits_[slots.ids[j] >> 6] = 0;
    }
  }

 private:
  uint64_t* bits_;
  int64_t vocab_size_;
};

template <typename T>
struct RowLogits {
  const T* data;
  int64_t stride;
  float temperature;
  float operator[](int64_t id) const { return scaled_logit(widen(data[id * stride]), temperature); }
};

// What is known of a row before its logits are read.
struct RowPlan {
  int32_t status;  // kScored: go on
  RowSlots slots;
  SlotScan scan;
  int32_t target;
  float temperature;
  bool full_vocab;
};

RowPlan plan_row(const Problem& problem, int64_t n) {
  RowPlan plan{};
  plan.target = problem.targets[n];
  if (plan.target < 0) {
    plan.status = kIgnored;
    return plan;
  }
  plan.temperature = problem.temperature[n * problem.temperature_stride];
  plan.slots = row_slots(problem.support, n);
  plan.scan = scan_slots(plan.slots, problem.vocab_size);
  plan.full_vocab = (problem.options & kFullVocab) != 0 && plan.scan.valid == 0;
  if (!is_usable_temperature(plan.temperature)) {
    plan.status = kBadTemperature;
  } else if (plan.slots.bad_extent || plan.scan.bad_id) {
    plan.status = kBadSupport;
  } else if ((problem.options & kNoTarget) == 0 && plan.target >= problem.vocab_size) {
    plan.status = kBadTarget;
  }
  return plan;
}

template <typename T>
RowLogits<T> row_logits(const Problem& problem, int64_t n, float temperature) {
  return {static_cast<const T*>(problem.logits) + row_offset(problem.layout, n),
          problem.layout.column_stride, temperature};
}

// The row's distinct members, block by block: f(x, count).
template <typename T, typename F>
void for_each_block(const Problem& problem, const RowPlan& plan, const RowLogits<T>& logits,
                    bool add_target, F f) {
  float x[kBlock];
  int filled = 0;
  if (plan.full_vocab) {
    for (int64_t start = 0; start < problem.vocab_size; start += kBlock) {
      const int64_t rest = problem.vocab_size - start;
      const int count = static_cast<int>(rest < kBlock ? rest : kBlock);
      for (int i = 0; i < count; ++i) x[i] = logits[start + i];
      f(x, count);
    }
    return;
  }
  SeenIds seen(plan.scan.distinct, problem.vocab_size);
  for (int64_t j = 0; j < plan.slots.count; ++j) {
    const int32_t id = plan.slots.ids[j];
    if (id < 0 || !seen.first_time(id)) continue;
    x[filled++] = logits[id];
    if (filled == kBlock) {
      f(x, filled);
      filled = 0;
    }
  }
  seen.forget(plan.slots);
  if (add_target) x[filled++] = logits[plan.target];
  if (filled > 0) f(x, filled);
}

struct BlockMax {
  float max = negative_infinity();
  bool not_finite = false;
  void operator()(const float* x, int count) {
    for (int i = 0; i < count; ++i) {
      not_finite |= is_nan_or_positive_infinity(x[i]);
      // +0 above -0, so that the order of the ids does not choose the sign of a zero maximum.
      const bool above = x[i] > max || (x[i] == max && bits_of(x[i]) == 0);
      max = above ? x[i] : max;
    }
  }
};

void add_block(const float* x, int count, float m, RowSums* sums) {
  RowSums local = *sums;
  for (int i = 0; i < count; ++i) add_member(x[i], m, &local);
  *sums = local;
}

struct ForwardRow {
  int32_t status;
  float target_logit;
  float max;
  RowSums sums;
};

bool contains(const RowSlots& slots, int32_t id) {
  for (int64_t j = 0; j < slots.count; ++j) {
    if (slots.ids[j] == id) return true;
  }
  return false;
}

template <typename T>
ForwardRow forward_row(const Problem& problem, int64_t n) {
  const RowPlan plan = plan_row(problem, n);
  ForwardRow row{plan.status, 0.0f, 0.0f, {0, 0}};
  if (plan.status != kScored) return row;
  const RowLogits<T> logits = row_logits<T>(problem, n, plan.temperature);
  const bool wants_target = (problem.options & kNoTarget) == 0;
  bool has_target = !wants_target || plan.full_vocab || contains(plan.slots, plan.target);
  const bool add_target = !has_target && (problem.options & kIncludeMissing) != 0;
  has_target = has_target || add_target;

  float kept[kBlock];  // the first block, for the second pass; most rows have no other
  int kept_count = 0;
  int blocks = 0;
  BlockMax found;
  for_each_block(problem, plan, logits, add_target, [&](const float* x, int count) {
    found(x, count);
    if (blocks++ == 0) {
      kept_count = count;
      std::memcpy(kept, x, static_cast<size_t>(count) * sizeof(float));
    }
  });
  if (found.not_finite) {
    row.status = kNotFinite;
    return row;
  }
  if (found.max == negative_infinity()) {
    row.status = kEmpty;
    return row;
  }
  row.max = found.max;
  if (blocks <= 1) {
    add_block(kept, kept_count, row.max, &row.sums);
  } else {
    for_each_block(problem, plan, logits, add_target,
                   [&](const float* x, int count) { add_block(x, count, row.max, &row.sums); });
  }
  if (wants_target) {
    row.target_logit = has_target ? logits[plan.target] : negative_infinity();
    if (row.target_logit == negative_infinity()) row.status = kMissing;
  }
  return row;
}

void store_row(const ForwardRow& row, const ForwardResult& result, int64_t n) {
  RowValues values;
  float target_logit = row.target_logit;
  switch (row.status) {
    case kScored:
    case kMissing:  // target_logit is -inf, and so is log_prob
      values = finish_row(row.target_logit, row.max, row.sums);
      break;
    case kIgnored:
      values = {0.0f, 0.0f, 0.0f};
      break;
    case kEmpty:
      values = {negative_infinity(), negative_infinity(), 0.0f};
      break;
    default:
      values = {canonical_nan(), canonical_nan(), canonical_nan()};
      target_logit = canonical_nan();
  }
  result.log_prob[n] = values.log_prob;
  result.logsumexp[n] = values.logsumexp;
  result.support_entropy[n] = values.support_entropy;
  result.target_logit[n] = target_logit;
  result.status[n] = row.status;
  result.max[n] = row.max;
  result.sum[n] = row.sums.sum;
  result.weighted_sum[n] = row.sums.weighted;
}

// The slots that more than one row claims go to the first of them. Rows usually stand one behind
// the other, and then there is nothing to remember.
class SlotOwners {
 public:
  SlotOwners(const Problem& problem, bool needed) {
    if (!needed || problem.support.begins == nullptr) return;
    const int64_t per_piece = problem.support.rows_per_piece;
    for (int64_t n = 0, reached = 0; n < problem.rows && owner_ == nullptr; ++n) {
      if (n % per_piece == 0) reached = 0;
      const RowSlots slots = row_slots(problem.support, n);
      if (slots.bad_extent || slots.count == 0) continue;
      if (problem.support.begins[n] < reached) remember(problem);
      reached = problem.support.ends[n];
    }
  }
  ~SlotOwners() { std::free(owner_); }
  SlotOwners(const SlotOwners&) = delete;
  SlotOwners& operator=(const SlotOwners&) = delete;

  // A row with a bad extent owns nothing: its slots may be its neighbours'.
  bool owns(const RowSlots& slots, int64_t j, int64_t n) const {
    return !slots.bad_extent && (owner_ == nullptr || owner_[slots.first + j] == n);
  }

 private:
  void remember(const Problem& problem) {
    const int64_t total = slot_count(problem.support);
    owner_ = static_cast<int64_t*>(std::malloc(static_cast<size_t>(total) * sizeof(int64_t)));
    if (owner_ == nullptr) std::abort();
    for (int64_t n = problem.rows - 1; n >= 0; --n) {
      const RowSlots slots = row_slots(problem.support, n);
      if (slots.bad_extent) continue;
      for (int64_t j = 0; j < slots.count; ++j) owner_[slots.first + j] = n;
    }
  }

  int64_t* owner_ = nullptr;
};

// Members
// -------------------------------------------------------------------------------------------------------------

template <typename T>
void members_row(const Problem& problem, const SavedRows& saved, const SlotOwners& owners,
                 float* out, int64_t n) {
  const int32_t status = saved.status[n];
  if (status == kIgnored || status == kEmpty) return;
  const RowSlots slots = row_slots(problem.support, n);
  const float temperature = problem.temperature[n * problem.temperature_stride];
  const RowLogits<T> logits = row_logits<T>(problem, n, temperature);
  const bool scored = status == kScored || status == kMissing;
  const double log_sum = scored ? log_fixed(saved.sum[n]) : 0.0;
  for (int64_t j = 0; j < slots.count; ++j) {
    const int32_t id = slots.ids[j];
    if (id == -1 || !owners.owns(slots, j, n)) continue;
    out[slots.first + j] =
        scored ? member_log_prob(logits[id], saved.max[n], log_sum) : canonical_nan();
  }
}

// Backward
// ------------------------------------------------------------------------------------------------------------

template <typename T>
struct RowOutput {
  T* data;
  int64_t stride;
  void zero(int64_t columns) const {
    if (stride == 1) {
      std::memset(static_cast<void*>(data), 0, static_cast<size_t>(columns) * sizeof(T));
    } else {
      for (int64_t i = 0; i < columns; ++i) data[i * stride] = T{};
    }
  }
  void set(int64_t id, float v) const { narrow(v, &data[id * stride]); }
};

// The member cotangents of a row; slots that another row owns carry none.
struct MemberCotangents {
  const float* values;  // nullptr: nobody asked
  const SlotOwners* owners;
  double at(const RowSlots& slots, int64_t j, int64_t n) const {
    if (values == nullptr || slots.ids[j] == -1 || !owners->owns(slots, j, n)) return 0.0;
    return static_cast<double>(values[slots.first + j]);
  }
};

bool any_cotangent(const Cotangents& cotangents, const MemberCotangents& members,
                   const RowSlots& slots, int64_t n) {
  if (cotangents.log_prob[n] != 0.0f || cotangents.logsumexp[n] != 0.0f) return true;
  if (cotangents.support_entropy[n] != 0.0f || cotangents.target_logit[n] != 0.0f) return true;
  for (int64_t j = 0; members.values != nullptr && j < slots.count; ++j) {
    if (members.at(slots, j, n) != 0.0) return true;
  }
  return false;
}

// A row that could not be scored: NaN at every member in range, if anybody asks for its gradient.
template <typename T>
void backward_bad_row(const Problem& problem, const RowPlan& plan, int32_t status, bool asked,
                      const RowOutput<T>& out) {
  out.zero(problem.columns);
  if (!asked) return;
  if (plan.full_vocab && status != kBadSupport) {
    for (int64_t id = 0; id < problem.vocab_size; ++id) out.set(id, canonical_nan());
    return;
  }
  for (int64_t j = 0; j < plan.slots.count; ++j) {
    if (is_member_id(plan.slots.ids[j], problem.vocab_size))
      out.set(plan.slots.ids[j], canonical_nan());
  }
  if ((problem.options & kIncludeMissing) != 0 && is_member_id(plan.target, problem.vocab_size)) {
    out.set(plan.target, canonical_nan());
  }
}

// Gives every slot of a repeated id the id's total, added in slot order.
void total_repeated(const RowSlots& slots, const MemberCotangents& members, int64_t n,
                    double* totals) {
  for (int64_t j = 0; j < slots.count; ++j) {
    if (slots.ids[j] >= 0) totals[slots.ids[j]] += members.at(slots, j, n);
  }
}

template <typename T>
void backward_scored_row(const Problem& problem, const RowPlan& plan, const RowGradient& row,
                         const MemberCotangents& members, const RowLogits<T>& logits,
                         const RowOutput<T>& out, int64_t n) {
  const int32_t target = (problem.options & kNoTarget) != 0 ? -1 : plan.target;
  if (plan.full_vocab) {  // reads and writes the same column, so it may run in place
    for (int64_t id = 0; id < problem.vocab_size; ++id) {
      out.set(id, member_gradient(row, logits[id], id == target, 0.0));
    }
    for (int64_t id = problem.vocab_size; id < problem.columns; ++id)
      out.data[id * out.stride] = T{};
    return;
  }
  // In place, the zeros would overwrite logits that are still to be read: gradients wait in a
  // buffer.
  const RowSlots& slots = plan.slots;
  float* gradients = t_state.gradients.get(slots.count + 1);
  double* totals = nullptr;
  if (members.values != nullptr && !plan.scan.distinct) {
    totals = t_state.id_totals.get_zeroed(kMaxVocabSize);
    total_repeated(slots, members, n, totals);
  }
  bool has_target = false;
  for (int64_t j = 0; j < slots.count; ++j) {
    const int32_t id = slots.ids[j];
    if (id < 0) continue;
    has_target |= id == target;
    const double cotangent = totals != nullptr ? totals[id] : members.at(slots, j, n);
    gradients[j] = member_gradient(row, logits[id], id == target, cotangent);
  }
  const bool add_target = !has_target && target >= 0 && (problem.options & kIncludeMissing) != 0;
  if (add_target) gradients[slots.count] = member_gradient(row, logits[target], true, 0.0);
  out.zero(problem.columns);
  for (int64_t j = 0; j < slots.count; ++j) {
    if (slots.ids[j] >= 0) out.set(slots.ids[j], gradients[j]);
    if (totals != nullptr && slots.ids[j] >= 0) totals[slots.ids[j]] = 0.0;
  }
  if (add_target) out.set(target, gradients[slots.count]);
}

template <typename T>
void backward_row(const Problem& problem, const SavedRows& saved, const Cotangents& cotangents,
                  const SlotOwners& owners, const GradientView& gradient, int64_t n) {
  const RowOutput<T> out{static_cast<T*>(gradient.data) + row_offset(gradient.layout, n),
                         gradient.layout.column_stride};
  const int32_t status = saved.status[n];
  if (status == kIgnored || status == kEmpty) {
    out.zero(problem.columns);
    return;
  }
  const RowPlan plan = plan_row(problem, n);
  const MemberCotangents members{cotangents.members, &owners};
  if (status != kScored && status != kMissing) {
    backward_bad_row(problem, plan, status, any_cotangent(cotangents, members, plan.slots, n), out);
    return;
  }
  LaneSum sum_members;
  for (int64_t j = 0; members.values != nullptr && j < plan.slots.count; ++j)
    sum_members.add(j, members.at(plan.slots, j, n));
  const bool scored = status == kScored;  // a missing target has no gradient of its own
  const RowGradient row = begin_gradient(
      saved.max[n], {saved.sum[n], saved.weighted_sum[n]}, plan.temperature,
      scored ? cotangents.log_prob[n] : 0.0, cotangents.logsumexp[n], cotangents.support_entropy[n],
      scored ? cotangents.target_logit[n] : 0.0, sum_members.total());
  backward_scored_row<T>(problem, plan, row, members, row_logits<T>(problem, n, plan.temperature),
                         out, n);
}

// Loops over rows
// -----------------------------------------------------------------------------------------------------

template <typename F>
void for_each_row(int64_t rows, int64_t cost, F f) {
  // Small ranges balance rows of unequal size; 64 rows are still well above the cost of taking a
  // range.
  int64_t grain = rows / (int64_t{num_threads()} * 8);
  grain = grain < 1 ? 1 : (grain > 64 ? 64 : grain);
  if (cost < kSerialCost) grain = rows;
  parallel_for(
      rows, grain,
      [](void* context, int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) (*static_cast<F*>(context))(n);
      },
      &f);
}

// Nanoseconds, roughly.
int64_t forward_cost(const Problem& problem) {
  const int64_t slots = slot_count(problem.support);
  const int64_t full = (problem.options & kFullVocab) != 0 ? problem.vocab_size : 0;
  return problem.rows * (100 + full) + slots * 2;
}

template <typename F>
void with_element_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBfloat16:
      return f(Bfloat16{});
    case DType::kFloat16:
      return f(Float16{});
  }
}

void forward(const Problem& problem, const ForwardResult& result) {
  if (problem.rows == 0) return;
  with_element_type(problem.dtype, [&](auto element) {
    for_each_row(problem.rows, forward_cost(problem), [&](int64_t n) {
      store_row(forward_row<decltype(element)>(problem, n), result, n);
    });
  });
}

void members(const Problem& problem, const SavedRows& saved, float* log_probs) {
  const int64_t slots = slot_count(problem.support);
  if (slots == 0) return;
  for (int64_t j = 0; j < slots; ++j) log_probs[j] = negative_infinity();
  const SlotOwners owners(problem, true);
  with_element_type(problem.dtype, [&](auto element) {
    for_each_row(problem.rows, forward_cost(problem), [&](int64_t n) {
      members_row<decltype(element)>(problem, saved, owners, log_probs, n);
    });
  });
}

void backward(const Problem& problem, const SavedRows& saved, const Cotangents& cotangents,
              const GradientView& gradient) {
  if (problem.rows == 0 || problem.columns == 0) return;
  const SlotOwners owners(problem, cotangents.members != nullptr);
  with_element_type(problem.dtype, [&](auto element) {
    for_each_row(problem.rows, forward_cost(problem) + problem.rows * problem.columns / 8,
                 [&](int64_t n) {
                   backward_row<decltype(element)>(problem, saved, cotangents, owners, gradient, n);
                 });
  });
}

}  // namespace

extern const CpuKernels TOPP_CONCAT(kCpuKernels_, TOPP_CPU_VARIANT);
const CpuKernels TOPP_CONCAT(kCpuKernels_, TOPP_CPU_VARIANT) = {
    forward, members, backward, arithmetic_hash, TOPP_STRING(TOPP_CPU_VARIANT)};

}  // namespace topp
