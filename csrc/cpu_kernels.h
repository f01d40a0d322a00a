// One build of the CPU kernels: TOPP_CPU_VARIANT names its instruction set, and its namespace.
#pragma once

#include "contract.h"

namespace topp {
namespace TOPP_CPU_VARIANT {

void forward(const Problem&, const ForwardResult&);
void members(const Problem&, const SavedRows&, float* log_probs);
void backward(const Problem&, const SavedRows&, const Cotangents&, const GradientView&);

}  // namespace TOPP_CPU_VARIANT
}  // namespace topp
