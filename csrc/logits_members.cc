// The log-probability of every recorded id, shaped as the token ids, on the CPU: the reference.
#include "cpu_kernels.h"
#include "cpu_rows.h"

namespace topp {
namespace {

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

}  // namespace

void TOPP_CPU_VARIANT::members(const Problem& problem, const SavedRows& saved, float* log_probs) {
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

}  // namespace topp
