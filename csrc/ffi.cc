// XLA FFI handlers for both platforms: decode the buffers, check their sizes, call the kernels.
//
// Leading axes are never reshaped on the JAX side: rows are whatever stands before the last axis of
// the logits.
#include "ffi.h"

#include <string>

#include "contract.h"
#include "xla/ffi/api/ffi.h"

namespace topp {
namespace {

namespace ffi = xla::ffi;

using S32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using S64 = ffi::Buffer<ffi::S64>;

int64_t leading(ffi::Span<const int64_t> dims) {
  int64_t n = 1;
  for (size_t i = 0; i + 1 < dims.size(); ++i) n *= dims[i];
  return n;
}

int64_t last(ffi::Span<const int64_t> dims) { return dims.size() == 0 ? 1 : dims[dims.size() - 1]; }

ffi::Error invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jax_topp: " + what);
}

bool element_type(ffi::DataType type, DType* out) {
  switch (type) {
    case ffi::F32:
      *out = DType::kFloat32;
      return true;
    case ffi::BF16:
      *out = DType::kBfloat16;
      return true;
    case ffi::F16:
      *out = DType::kFloat16;
      return true;
    default:
      return false;
  }
}

RowLayout dense_rows(int64_t rows, int64_t columns) {
  RowLayout layout{};
  layout.rank = 1;
  layout.shape[0] = rows;
  layout.stride[0] = columns;
  layout.column_stride = 1;
  return layout;
}

// The operands that every call starts with.
struct Operands {
  ffi::AnyBuffer logits;
  S32 token_ids, begins, ends, targets;
  F32 temperature;
};

ffi::Error decode(const Operands& in, int64_t vocab_size, int32_t options, Problem* problem) {
  const bool padded = (options & kPadded) != 0;
  if (!element_type(in.logits.element_type(), &problem->dtype)) {
    return invalid("logits must be float32, bfloat16 or float16");
  }
  problem->logits = in.logits.untyped_data();
  problem->rows = leading(in.logits.dimensions());
  problem->columns = last(in.logits.dimensions());
  problem->layout = dense_rows(problem->rows, problem->columns);
  problem->vocab_size = vocab_size;
  problem->options = options;
  const int64_t rows = problem->rows;
  if (vocab_size < 0 || vocab_size > problem->columns || vocab_size > kMaxVocabSize) {
    return invalid("vocab_size is outside the logits' columns or above 262144");
  }
  SupportView& support = problem->support;
  support.token_ids = in.token_ids.typed_data();
  support.begins = padded ? nullptr : in.begins.typed_data();
  support.ends = padded ? nullptr : in.ends.typed_data();
  support.capacity = last(in.token_ids.dimensions());
  support.rows_per_piece = padded ? 1 : last(in.begins.dimensions());
  support.pieces = leading(in.token_ids.dimensions());
  if (support.pieces * support.rows_per_piece != rows)
    return invalid("support and logits disagree on the number of rows");
  if (!padded && (static_cast<int64_t>(in.begins.element_count()) != rows ||
                  static_cast<int64_t>(in.ends.element_count()) != rows)) {
    return invalid("begins and ends must have one entry a row");
  }
  if (static_cast<int64_t>(in.targets.element_count()) != rows)
    return invalid("targets must have one entry a row");
  problem->targets = in.targets.typed_data();
  const int64_t temperatures = static_cast<int64_t>(in.temperature.element_count());
  if (temperatures != 1 && temperatures != rows)
    return invalid("temperature must have one entry, or one a row");
  problem->temperature = in.temperature.typed_data();
  problem->temperature_stride = temperatures == 1 ? 0 : 1;
  return ffi::Error::Success();
}

template <typename Buffer>
bool has_rows(const Buffer& buffer, const Problem& problem) {
  return static_cast<int64_t>(buffer.element_count()) == problem.rows;
}

// Where a handler runs: the CPU, or a stream. -1 leaves the device to the stream's context.
struct Cpu {
  ffi::Error forward(const Problem& p, const ForwardResult& r) const {
    cpu_kernels().forward(p, r);
    return ffi::Error::Success();
  }
  ffi::Error members(const Problem& p, const SavedRows& s, float* out) const {
    cpu_kernels().members(p, s, out);
    return ffi::Error::Success();
  }
  ffi::Error backward(const Problem& p, const SavedRows& s, const Cotangents& c,
                      const GradientView& g) const {
    cpu_kernels().backward(p, s, c, g);
    return ffi::Error::Success();
  }
};

struct Cuda {
  void* stream;
  static ffi::Error answer(const char* problem) {
    if (problem == nullptr) return ffi::Error::Success();
    return ffi::Error(
        cuda_built() ? ffi::ErrorCode::kInternal : ffi::ErrorCode::kFailedPrecondition, problem);
  }
  ffi::Error forward(const Problem& p, const ForwardResult& r) const {
    return answer(cuda_forward(p, r, -1, stream));
  }
  ffi::Error members(const Problem& p, const SavedRows& s, float* out) const {
    return answer(cuda_members(p, s, out, -1, stream));
  }
  ffi::Error backward(const Problem& p, const SavedRows& s, const Cotangents& c,
                      const GradientView& g) const {
    return answer(cuda_backward(p, s, c, g, -1, stream));
  }
};

template <typename Platform>
ffi::Error forward(const Platform& platform, ffi::AnyBuffer logits, S32 token_ids, S32 begins,
                   S32 ends, S32 targets, F32 temperature, int64_t vocab_size, int32_t options,
                   ffi::Result<F32> log_prob, ffi::Result<F32> logsumexp,
                   ffi::Result<F32> support_entropy, ffi::Result<F32> target_logit,
                   ffi::Result<S32> status, ffi::Result<F32> max, ffi::Result<S64> sum,
                   ffi::Result<S64> weighted_sum) {
  const Operands in{logits, token_ids, begins, ends, targets, temperature};
  Problem problem;
  if (ffi::Error error = decode(in, vocab_size, options, &problem); error.failure()) return error;
  if (!has_rows(*log_prob, problem) || !has_rows(*logsumexp, problem) ||
      !has_rows(*support_entropy, problem) || !has_rows(*target_logit, problem) ||
      !has_rows(*status, problem) || !has_rows(*max, problem) || !has_rows(*sum, problem) ||
      !has_rows(*weighted_sum, problem)) {
    return invalid("every result must have one entry a row");
  }
  return platform.forward(
      problem, {log_prob->typed_data(), logsumexp->typed_data(), support_entropy->typed_data(),
                target_logit->typed_data(), status->typed_data(), max->typed_data(),
                sum->typed_data(), weighted_sum->typed_data()});
}

template <typename Platform>
ffi::Error members(const Platform& platform, ffi::AnyBuffer logits, S32 token_ids, S32 begins,
                   S32 ends, S32 targets, F32 temperature, S32 status, F32 max, S64 sum,
                   int64_t vocab_size, int32_t options, ffi::Result<F32> log_probs) {
  const Operands in{logits, token_ids, begins, ends, targets, temperature};
  Problem problem;
  if (ffi::Error error = decode(in, vocab_size, options, &problem); error.failure()) return error;
  if (!has_rows(status, problem) || !has_rows(max, problem) || !has_rows(sum, problem)) {
    return invalid("the saved rows must have one entry a row");
  }
  if (log_probs->element_count() != in.token_ids.element_count()) {
    return invalid("member log-probs must be shaped as the token ids");
  }
  const SavedRows saved{status.typed_data(), max.typed_data(), sum.typed_data(), nullptr};
  return platform.members(problem, saved, log_probs->typed_data());
}

template <typename Platform>
ffi::Error backward(const Platform& platform, ffi::AnyBuffer logits, S32 token_ids, S32 begins,
                    S32 ends, S32 targets, F32 temperature, S32 status, F32 max, S64 sum,
                    S64 weighted_sum, F32 log_prob, F32 logsumexp, F32 support_entropy,
                    F32 target_logit, F32 member_log_probs, int64_t vocab_size, int32_t options,
                    ffi::Result<ffi::AnyBuffer> gradient) {
  const Operands in{logits, token_ids, begins, ends, targets, temperature};
  Problem problem;
  if (ffi::Error error = decode(in, vocab_size, options, &problem); error.failure()) return error;
  if (!has_rows(status, problem) || !has_rows(max, problem) || !has_rows(sum, problem) ||
      !has_rows(weighted_sum, problem) || !has_rows(log_prob, problem) ||
      !has_rows(logsumexp, problem) || !has_rows(support_entropy, problem) ||
      !has_rows(target_logit, problem)) {
    return invalid("saved rows and cotangents must have one entry a row");
  }
  const bool with_members = member_log_probs.element_count() != 0;
  if (with_members && member_log_probs.element_count() != in.token_ids.element_count()) {
    return invalid("member cotangents must be shaped as the token ids");
  }
  if (gradient->element_type() != in.logits.element_type() ||
      gradient->element_count() != in.logits.element_count()) {
    return invalid("the gradient must have the logits' shape and dtype");
  }
  const SavedRows saved{status.typed_data(), max.typed_data(), sum.typed_data(),
                        weighted_sum.typed_data()};
  const Cotangents cotangents{log_prob.typed_data(), logsumexp.typed_data(),
                              support_entropy.typed_data(), target_logit.typed_data(),
                              with_members ? member_log_probs.typed_data() : nullptr};
  return platform.backward(problem, saved, cotangents, {gradient->untyped_data(), problem.layout});
}

// Operands, attributes and results, in the order of jax_topp/_ffi.py. The CUDA handlers take the
// stream first.
auto on_cpu() { return ffi::Ffi::Bind(); }
auto on_cuda() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>(); }

template <typename Binding>
auto bind_operands(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<S32>()
      .template Arg<S32>()
      .template Arg<S32>()
      .template Arg<S32>()
      .template Arg<F32>();
}

template <typename Binding>
auto bind_attributes(Binding&& binding) {
  return std::move(binding).template Attr<int64_t>("vocab_size").template Attr<int32_t>("options");
}

template <typename Binding>
auto bind_forward(Binding&& binding) {
  return bind_attributes(bind_operands(std::move(binding)))
      .template Ret<F32>()
      .template Ret<F32>()
      .template Ret<F32>()
      .template Ret<F32>()
      .template Ret<S32>()
      .template Ret<F32>()
      .template Ret<S64>()
      .template Ret<S64>();
}

template <typename Binding>
auto bind_members(Binding&& binding) {
  return bind_attributes(bind_operands(std::move(binding))
                             .template Arg<S32>()
                             .template Arg<F32>()
                             .template Arg<S64>())
      .template Ret<F32>();
}

template <typename Binding>
auto bind_backward(Binding&& binding) {
  return bind_attributes(bind_operands(std::move(binding))
                             .template Arg<S32>()
                             .template Arg<F32>()
                             .template Arg<S64>()
                             .template Arg<S64>()
                             .template Arg<F32>()
                             .template Arg<F32>()
                             .template Arg<F32>()
                             .template Arg<F32>()
                             .template Arg<F32>())
      .template Ret<ffi::AnyBuffer>();
}

// Same launches every time, no allocation, no operand read on the host: the calls may sit in a CUDA
// graph.
constexpr auto kGraphSafe = ffi::Traits::kCmdBufferCompatible;

XLA_FFI_DEFINE_HANDLER(
    kForwardCpu, [](auto... args) { return forward(Cpu{}, args...); }, bind_forward(on_cpu()));
XLA_FFI_DEFINE_HANDLER(
    kMembersCpu, [](auto... args) { return members(Cpu{}, args...); }, bind_members(on_cpu()));
XLA_FFI_DEFINE_HANDLER(
    kBackwardCpu, [](auto... args) { return backward(Cpu{}, args...); }, bind_backward(on_cpu()));
XLA_FFI_DEFINE_HANDLER(kForwardCuda,
                       [](void* stream, auto... args) { return forward(Cuda{stream}, args...); },
                       bind_forward(on_cuda()), {kGraphSafe});
XLA_FFI_DEFINE_HANDLER(kMembersCuda,
                       [](void* stream, auto... args) { return members(Cuda{stream}, args...); },
                       bind_members(on_cuda()), {kGraphSafe});
XLA_FFI_DEFINE_HANDLER(kBackwardCuda,
                       [](void* stream, auto... args) { return backward(Cuda{stream}, args...); },
                       bind_backward(on_cuda()), {kGraphSafe});

}  // namespace

// The number in a name is the contract's: a change of meaning or signature takes a new one, because
// exported programs and compilation caches find their target by name alone.
const FfiTarget* ffi_targets(int* count) {
  static const FfiTarget targets[] = {
      {"jax_topp.forward.v1", "cpu", reinterpret_cast<void*>(kForwardCpu)},
      {"jax_topp.members.v1", "cpu", reinterpret_cast<void*>(kMembersCpu)},
      {"jax_topp.backward.v1", "cpu", reinterpret_cast<void*>(kBackwardCpu)},
      {"jax_topp.forward.v1", "CUDA", reinterpret_cast<void*>(kForwardCuda)},
      {"jax_topp.members.v1", "CUDA", reinterpret_cast<void*>(kMembersCuda)},
      {"jax_topp.backward.v1", "CUDA", reinterpret_cast<void*>(kBackwardCuda)},
  };
  *count = static_cast<int>(sizeof targets / sizeof targets[0]);
  return targets;
}

}  // namespace topp
