// What narrow and wide rows of the CUDA forward share: the maximum, and the target's part.
#pragma once

#include "forward_row.h"
#include "logits_cuda.cuh"

namespace topp {
namespace {

constexpr int kThreads = 128;

// Floats as integers of the same order (-0 below +0); what makes a row not finite is the greatest.
constexpr int32_t kNotFiniteKey = INT32_MAX;
constexpr int32_t kEmptyKey = -0x7f800001;  // of -inf

TOPP_DEVICE int32_t flip(int32_t b) { return b ^ ((b >> 31) & 0x7fffffff); }
TOPP_DEVICE int32_t max_key(float x) {
  return is_nan_or_positive_infinity(x) ? kNotFiniteKey : flip(static_cast<int32_t>(bits_of(x)));
}

// Takes a row's maximum into `row`; false: there is nothing to sum up.
TOPP_DEVICE bool set_max(int32_t key, ForwardRow* row) {
  if (row->status != kScored) return false;
  if (key == kNotFiniteKey || key == kEmptyKey) {
    row->status = key == kEmptyKey ? kEmpty : kNotFinite;
    return false;
  }
  row->max = float_of(static_cast<uint32_t>(flip(key)));
  return true;
}

// What the options make of a row's target.
struct TargetPlan {
  bool wanted;  // the target is scored
  bool added;   // and joins the members
  bool member;
};

TOPP_DEVICE TargetPlan plan_target(const Problem& problem, bool found) {
  TargetPlan plan;
  plan.wanted = (problem.options & kNoTarget) == 0;
  plan.added = plan.wanted && !found && (problem.options & kIncludeMissing) != 0;
  plan.member = found || plan.added;
  return plan;
}

TOPP_DEVICE void set_target(const TargetPlan& plan, float target_logit, ForwardRow* row) {
  if (!plan.wanted) return;
  row->target_logit = plan.member ? target_logit : negative_infinity();
  if (row->target_logit == negative_infinity()) row->status = kMissing;
}

}  // namespace
}  // namespace topp
