// Getting a device ready, once: under lazy loading a kernel's first launch loads it, which a graph
// capture may refuse.
#include <atomic>

#include "logits_cuda.cuh"

namespace topp {

const char* cuda_prepare(int device) {
  static std::atomic<uint64_t> ready{0};  // a bit a device
  if (device < 0) {
    if (const char* error = error_text(cudaGetDevice(&device))) return error;
  }
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((ready.load(std::memory_order_acquire) & bit) != 0) return nullptr;
  int before = 0;
  if (const char* error = error_text(cudaGetDevice(&before))) return error;
  if (const char* error = error_text(cudaSetDevice(device))) return error;
  const char* error = prepare_forward();
  if (error == nullptr) error = prepare_members();
  if (error == nullptr) error = prepare_backward();
  if (error == nullptr) ready.fetch_or(bit, std::memory_order_release);
  cudaSetDevice(before);
  return error;
}

}  // namespace topp
