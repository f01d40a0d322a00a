// The arithmetic's hash on a CUDA device: the same header, compiled by nvcc.
#include <cuda_runtime.h>

#include "arithmetic_hash.h"
#include "contract.h"

namespace topp {
namespace {

__global__ void hash_kernel(uint64_t* out) { *out = arithmetic_hash(); }

const char* text(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* cuda_arithmetic_hash(uint64_t* hash) {
  uint64_t* device = nullptr;
  if (const char* error = text(cudaMalloc(&device, sizeof *device))) return error;
  hash_kernel<<<1, 1>>>(device);
  const char* error = text(cudaGetLastError());
  if (error == nullptr)
    error = text(cudaMemcpy(hash, device, sizeof *hash, cudaMemcpyDeviceToHost));
  cudaFree(device);
  return error;
}

bool cuda_built() { return true; }

const char* cuda_unavailable() {
  int count = 0;
  if (const char* error = text(cudaGetDeviceCount(&count))) return error;
  return count > 0 ? nullptr : "no CUDA device";
}

}  // namespace topp
