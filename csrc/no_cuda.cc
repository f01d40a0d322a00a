// The CUDA entry points of a build without CUDA: each says how to get one.
#include "contract.h"

namespace topp {
namespace {

constexpr const char* kWithoutCuda =
    "jax_topp was built without CUDA kernels: install the CUDA toolkit (nvcc on PATH) and "
    "reinstall with "
    "--config-settings=cmake.define.JAX_TOPP_CUDA=ON, or move the arrays to the CPU";

}  // namespace

const char* cuda_forward(const Problem&, const ForwardResult&, int, void*) { return kWithoutCuda; }
const char* cuda_members(const Problem&, const SavedRows&, float*, int, void*) {
  return kWithoutCuda;
}
const char* cuda_backward(const Problem&, const SavedRows&, const Cotangents&, const GradientView&,
                          int, void*) {
  return kWithoutCuda;
}
bool cuda_built() { return false; }
const char* cuda_unavailable() { return kWithoutCuda; }
const char* cuda_arithmetic_hash(uint64_t*) { return kWithoutCuda; }

}  // namespace topp
