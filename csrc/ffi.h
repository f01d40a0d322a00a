// The XLA FFI handlers, as plain addresses for the module to wrap.
#pragma once

namespace topp {

struct FfiTarget {
  const char* name;
  const char* platform;  // "cpu" or "CUDA": JAX knows no other spelling
  void* handler;
};

const FfiTarget* ffi_targets(int* count);

}  // namespace topp
