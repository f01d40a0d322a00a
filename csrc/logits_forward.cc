// Row results from logits, on the CPU: the reference.
#include <cstring>

#include "cpu_kernels.h"
#include "cpu_rows.h"
#include "forward_row.h"

namespace topp {
namespace {

constexpr int kBlock = 256;  // members gathered at a time; a typical row fits in one block

thread_local Scratch<uint64_t> t_seen;  // a bit a vocabulary id, all clear between rows

// Which ids of the row at hand were met before: ids repeat only where the scan could not rule it
// out.
class SeenIds {
 public:
  SeenIds(bool distinct, int64_t vocab_size)
      : bits_(distinct ? nullptr : t_seen.get_zeroed((kMaxVocabSize + 63) / 64)),
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

}  // namespace

void TOPP_CPU_VARIANT::forward(const Problem& problem, const ForwardResult& result) {
  if (problem.rows == 0) return;
  with_element_type(problem.dtype, [&](auto element) {
    for_each_row(problem.rows, forward_cost(problem), [&](int64_t n) {
      store_row(forward_row<decltype(element)>(problem, n), result, n);
    });
  });
}

}  // namespace topp
