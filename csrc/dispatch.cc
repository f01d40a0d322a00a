// Which build of the CPU kernels runs on this processor.
#include <cstdlib>
#include <cstring>

#include "contract.h"

namespace topp {

extern const CpuKernels kCpuKernels_baseline;
#if defined(TOPP_HAVE_CPU_V3)
extern const CpuKernels kCpuKernels_v3;

static bool runs_v3() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("f16c");
}
#endif

const CpuKernels* cpu_kernels_named(const char* name) {
  if (std::strcmp(name, "baseline") == 0) return &kCpuKernels_baseline;
#if defined(TOPP_HAVE_CPU_V3)
  if (std::strcmp(name, "v3") == 0 && runs_v3()) return &kCpuKernels_v3;
#endif
  return nullptr;
}

static const CpuKernels* choose() {
  if (const char* wanted = std::getenv("JAX_TOPP_CPU")) {
    if (const CpuKernels* kernels = cpu_kernels_named(wanted)) return kernels;
  }
  const CpuKernels* kernels = cpu_kernels_named("v3");
  return kernels != nullptr ? kernels : &kCpuKernels_baseline;
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels* kernels = choose();
  return *kernels;
}

}  // namespace topp
