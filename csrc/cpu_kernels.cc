// The table of one build of the CPU kernels; dispatch.cc chooses between the builds.
#include "cpu_kernels.h"

#include "arithmetic_hash.h"

#define TOPP_CONCAT_(a, b) a##b
#define TOPP_CONCAT(a, b) TOPP_CONCAT_(a, b)
#define TOPP_STRING_(a) #a
#define TOPP_STRING(a) TOPP_STRING_(a)

namespace topp {

static uint64_t hash() { return arithmetic_hash(); }

extern const CpuKernels TOPP_CONCAT(kCpuKernels_, TOPP_CPU_VARIANT);
const CpuKernels TOPP_CONCAT(kCpuKernels_, TOPP_CPU_VARIANT) = {
    TOPP_CPU_VARIANT::forward, TOPP_CPU_VARIANT::members, TOPP_CPU_VARIANT::backward, hash,
    TOPP_STRING(TOPP_CPU_VARIANT)};

}  // namespace topp
