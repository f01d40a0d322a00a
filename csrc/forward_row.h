// A row's results before and after rounding, for the CPU and the CUDA forward.
#pragma once

#include "contract.h"
#include "exact.h"

namespace topp {

struct ForwardRow {
  int32_t status;
  float target_logit;
  float max;
  RowSums sums;
};

TOPP_INLINE void store_row(const ForwardRow& row, const ForwardResult& result, int64_t n) {
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

}  // namespace topp
