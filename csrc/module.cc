// The Python module: FFI targets as capsules, the kernels over raw addresses, and what this build
// is.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "arithmetic_hash.h"
#include "contract.h"
#include "ffi.h"
#include "parallel.h"

namespace nb = nanobind;
using topp::Problem;

namespace {

using Addresses = std::vector<uint64_t>;

template <typename T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

topp::RowLayout row_layout(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  if (shape.size() != strides.size() || shape.empty() || shape.size() > topp::kMaxRank + 1) {
    throw std::invalid_argument("jax_topp: rows must have 0 to 4 axes after merging");
  }
  topp::RowLayout layout{};
  layout.rank = static_cast<int32_t>(shape.size()) - 1;
  for (int i = 0; i < layout.rank; ++i) {
    layout.shape[i] = shape[static_cast<size_t>(i)];
    layout.stride[i] = strides[static_cast<size_t>(i)];
  }
  layout.column_stride = strides.back();
  if (layout.rank == 0) {
    layout.rank = 1;
    layout.shape[0] = 1;
  }
  return layout;
}

// One call's operands, over addresses; the caller keeps the memory alive and has checked shapes and
// dtypes.
Problem problem_of(int dtype, uint64_t logits, const std::vector<int64_t>& shape,
                   const std::vector<int64_t>& strides, uint64_t token_ids, uint64_t begins,
                   uint64_t ends, int64_t capacity, int64_t rows_per_piece, int64_t pieces,
                   uint64_t targets, uint64_t temperature, int64_t temperature_stride,
                   int64_t vocab_size, int options) {
  Problem problem{};
  problem.dtype = static_cast<topp::DType>(dtype);
  problem.logits = at<const void>(logits);
  problem.layout = row_layout(shape, strides);
  problem.rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) problem.rows *= shape[i];
  problem.columns = shape.back();
  if (vocab_size < 0 || vocab_size > problem.columns || vocab_size > topp::kMaxVocabSize) {
    throw std::invalid_argument(
        "jax_topp: vocab_size is outside the logits' columns or above 262144");
  }
  problem.vocab_size = vocab_size;
  problem.support = {at<const int32_t>(token_ids),
                     at<const int32_t>(begins),
                     at<const int32_t>(ends),
                     capacity,
                     rows_per_piece,
                     pieces};
  problem.targets = at<const int32_t>(targets);
  problem.temperature = at<const float>(temperature);
  problem.temperature_stride = temperature_stride;
  problem.options = options;
  return problem;
}

topp::SavedRows saved_rows(const Addresses& a) {
  return {at<const int32_t>(a.at(0)), at<const float>(a.at(1)), at<const int64_t>(a.at(2)),
          at<const int64_t>(a.at(3))};
}

// device < 0 is the CPU; `kernels` names a CPU build ("" is the one that this processor uses).
const topp::CpuKernels& cpu(const std::string& kernels) {
  if (kernels.empty()) return topp::cpu_kernels();
  const topp::CpuKernels* named = topp::cpu_kernels_named(kernels.c_str());
  if (named == nullptr)
    throw std::invalid_argument("jax_topp: this processor has no CPU kernels named " + kernels);
  return *named;
}

void require(const char* problem) {
  if (problem != nullptr) throw std::runtime_error(problem);
}

void forward(const Problem& problem, const Addresses& results, int device, uint64_t stream,
             const std::string& kernels) {
  const topp::ForwardResult result{at<float>(results.at(0)),   at<float>(results.at(1)),
                                   at<float>(results.at(2)),   at<float>(results.at(3)),
                                   at<int32_t>(results.at(4)), at<float>(results.at(5)),
                                   at<int64_t>(results.at(6)), at<int64_t>(results.at(7))};
  const topp::CpuKernels& host = cpu(kernels);
  const char* error = nullptr;
  {
    nb::gil_scoped_release release;
    if (device < 0) {
      host.forward(problem, result);
    } else {
      error = topp::cuda_forward(problem, result, device, at<void>(stream));
    }
  }
  require(error);
}

void members(const Problem& problem, const Addresses& saved, uint64_t log_probs, int device,
             uint64_t stream, const std::string& kernels) {
  const topp::SavedRows rows = saved_rows(saved);
  const topp::CpuKernels& host = cpu(kernels);
  const char* error = nullptr;
  {
    nb::gil_scoped_release release;
    if (device < 0) {
      host.members(problem, rows, at<float>(log_probs));
    } else {
      error = topp::cuda_members(problem, rows, at<float>(log_probs), device, at<void>(stream));
    }
  }
  require(error);
}

void backward(const Problem& problem, const Addresses& saved, const Addresses& cotangents,
              uint64_t gradient, const std::vector<int64_t>& strides, int device, uint64_t stream,
              const std::string& kernels) {
  const topp::SavedRows rows = saved_rows(saved);
  const topp::Cotangents given{at<const float>(cotangents.at(0)), at<const float>(cotangents.at(1)),
                               at<const float>(cotangents.at(2)), at<const float>(cotangents.at(3)),
                               at<const float>(cotangents.at(4))};
  std::vector<int64_t> shape(problem.layout.shape, problem.layout.shape + problem.layout.rank);
  shape.push_back(problem.columns);
  const topp::GradientView view{at<void>(gradient), row_layout(shape, strides)};
  const topp::CpuKernels& host = cpu(kernels);
  const char* error = nullptr;
  {
    nb::gil_scoped_release release;
    if (device < 0) {
      host.backward(problem, rows, given, view);
    } else {
      error = topp::cuda_backward(problem, rows, given, view, device, at<void>(stream));
    }
  }
  require(error);
}

nb::dict ffi_targets() {
  nb::dict by_name;
  int count = 0;
  const topp::FfiTarget* targets = topp::ffi_targets(&count);
  for (int i = 0; i < count; ++i) {
    if (!by_name.contains(targets[i].name)) by_name[targets[i].name] = nb::dict();
    nb::cast<nb::dict>(by_name[targets[i].name])[targets[i].platform] =
        nb::capsule(targets[i].handler);
  }
  return by_name;
}

nb::dict build_info() {
  nb::dict info;
  info["cuda"] = topp::cuda_built();
  const char* reason = topp::cuda_unavailable();
  info["cuda_reason"] = reason == nullptr ? "" : reason;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  nb::list variants;
  for (const char* name : {"baseline", "v3"}) {
    if (topp::cpu_kernels_named(name) != nullptr) variants.append(name);
  }
  info["cpu_variants"] = variants;
  info["cpu_variant"] = topp::cpu_kernels().name;
  return info;
}

uint64_t arithmetic_hash(const std::string& kernels) { return cpu(kernels).arithmetic_hash(); }

uint64_t cuda_arithmetic_hash() {
  uint64_t hash = 0;
  require(topp::cuda_arithmetic_hash(&hash));
  return hash;
}

void check_arithmetic() {
  const uint64_t hash = topp::cpu_kernels().arithmetic_hash();
  if (hash != topp::kArithmeticHash) {
    throw std::runtime_error(
        "jax_topp: this build's arithmetic differs from the contract, so its results would not "
        "match other machines' "
        "(was it compiled with -ffast-math, -ffp-contract=fast or -mfpmath=387?): expected hash " +
        std::to_string(topp::kArithmeticHash) + ", computed " + std::to_string(hash));
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() =
      "Kernels of jax_topp over raw addresses. jax_topp and jax_topp.torch are the public face.";
  nb::class_<Problem>(m, "Problem", "The operands of one call; holds addresses, not memory.");
  m.def("problem", &problem_of, nb::arg("dtype"), nb::arg("logits"), nb::arg("shape"),
        nb::arg("strides"), nb::arg("token_ids"), nb::arg("begins"), nb::arg("ends"),
        nb::arg("capacity"), nb::arg("rows_per_piece"), nb::arg("pieces"), nb::arg("targets"),
        nb::arg("temperature"), nb::arg("temperature_stride"), nb::arg("vocab_size"),
        nb::arg("options"),
        "shape and strides (in elements) are the logits', columns last; begins = ends = 0 is a "
        "padded support.");
  m.def("forward", &forward, nb::arg("problem"), nb::arg("results"), nb::arg("device") = -1,
        nb::arg("stream") = 0, nb::arg("kernels") = "",
        "results: addresses of log_prob, logsumexp, support_entropy, target_logit, status, max, "
        "sum, weighted_sum.");
  m.def("members", &members, nb::arg("problem"), nb::arg("saved"), nb::arg("log_probs"),
        nb::arg("device") = -1, nb::arg("stream") = 0, nb::arg("kernels") = "",
        "saved: addresses of status, max, sum, weighted_sum.");
  m.def("backward", &backward, nb::arg("problem"), nb::arg("saved"), nb::arg("cotangents"),
        nb::arg("gradient"), nb::arg("strides"), nb::arg("device") = -1, nb::arg("stream") = 0,
        nb::arg("kernels") = "",
        "cotangents: addresses of log_prob's, logsumexp's, support_entropy's, target_logit's and "
        "the members' (or 0).");
  m.def("ffi_targets", &ffi_targets, "Name to platform to capsule.");
  m.def("build_info", &build_info);
  m.def("arithmetic_hash", &arithmetic_hash, nb::arg("kernels") = "");
  m.def("cuda_arithmetic_hash", &cuda_arithmetic_hash);
  m.def("num_threads", &topp::num_threads);
  m.def("set_num_threads", &topp::set_num_threads, nb::arg("n"));
  m.attr("ARITHMETIC_HASH") = topp::kArithmeticHash;
  check_arithmetic();
}
