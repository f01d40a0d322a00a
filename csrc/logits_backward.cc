// The gradient with respect to the logits, dense, on the CPU: the reference.
#include <cstring>

#include "cpu_kernels.h"
#include "cpu_rows.h"

namespace topp {
namespace {

struct ThreadState {
  Scratch<double> id_totals;  // a double a vocabulary id, all zero between rows; only for repeated
                              // ids with cotangents
  Scratch<float> gradients;   // one a slot of the row at hand
};

thread_local ThreadState t_state;

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

}  // namespace

void TOPP_CPU_VARIANT::backward(const Problem& problem, const SavedRows& saved,
                                const Cotangents& cotangents, const GradientView& gradient) {
  if (problem.rows == 0 || problem.columns == 0) return;
  const SlotOwners owners(problem, cotangents.members != nullptr);
  with_element_type(problem.dtype, [&](auto element) {
    for_each_row(problem.rows, forward_cost(problem) + problem.rows * problem.columns / 8,
                 [&](int64_t n) {
                   backward_row<decltype(element)>(problem, saved, cotangents, owners, gradient, n);
                 });
  });
}

}  // namespace topp
