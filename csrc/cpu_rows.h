// What the CPU kernels share: a row's plan, who owns a slot, memory of a thread, the loop over
// rows.
//
// The kernels are compiled once per instruction set, and the linker must not mix the builds: all
// here has internal linkage, and no library template is used that could be merged with another
// build's copy.
#pragma once

#include <cstdlib>

#include "contract.h"
#include "exact.h"
#include "parallel.h"
#include "support.h"

namespace topp {
namespace {

// 1. Rows
// -------------------------------------------------------------------------------------------------

// What is known of a row before its logits are read.
struct RowPlan {
  int32_t status;  // kScored: go on
  RowSlots slots;
  SlotScan scan;
  int32_t target;
  float temperature;
  bool full_vocab;
};

inline RowPlan plan_row(const Problem& problem, int64_t n) {
  RowPlan plan{};
  plan.target = problem.targets[n];
  if (plan.target < 0) {
    plan.status = kIgnored;
    return plan;
  }
  plan.temperature = problem.temperature[n * problem.temperature_stride];
  plan.slots = row_slots(problem.support, n);
  plan.scan = scan_slots(plan.slots, problem.vocab_size);
  plan.full_vocab = (problem.options & kFullVocab) != 0 && plan.scan.valid == 0;
  if (!is_usable_temperature(plan.temperature)) {
    plan.status = kBadTemperature;
  } else if (plan.slots.bad_extent || plan.scan.bad_id) {
    plan.status = kBadSupport;
  } else if ((problem.options & kNoTarget) == 0 && plan.target >= problem.vocab_size) {
    plan.status = kBadTarget;
  }
  return plan;
}

template <typename T>
struct RowLogits {
  const T* data;
  int64_t stride;
  float temperature;
  float operator[](int64_t id) const { return scaled_logit(widen(data[id * stride]), temperature); }
};

template <typename T>
RowLogits<T> row_logits(const Problem& problem, int64_t n, float temperature) {
  return {static_cast<const T*>(problem.logits) + row_offset(problem.layout, n),
          problem.layout.column_stride, temperature};
}

// The slots that more than one row claims go to the first of them. Rows usually stand one behind
// the other, and then there is nothing to remember.
class SlotOwners {
 public:
  SlotOwners(const Problem& problem, bool needed) {
    if (!needed || problem.support.begins == nullptr) return;
    const int64_t per_piece = problem.support.rows_per_piece;
    for (int64_t n = 0, reached = 0; n < problem.rows && owner_ == nullptr; ++n) {
      if (n % per_piece == 0) reached = 0;
      const RowSlots slots = row_slots(problem.support, n);
      if (slots.bad_extent || slots.count == 0) continue;
      if (problem.support.begins[n] < reached) remember(problem);
      reached = problem.support.ends[n];
    }
  }
  ~SlotOwners() { std::free(owner_); }
  SlotOwners(const SlotOwners&) = delete;
  SlotOwners& operator=(const SlotOwners&) = delete;

  // A row with a bad extent owns nothing: its slots may be its neighbours'.
  bool owns(const RowSlots& slots, int64_t j, int64_t n) const {
    return !slots.bad_extent && (owner_ == nullptr || owner_[slots.first + j] == n);
  }

 private:
  void remember(const Problem& problem) {
    const int64_t total = slot_count(problem.support);
    owner_ = static_cast<int64_t*>(std::malloc(static_cast<size_t>(total) * sizeof(int64_t)));
    if (owner_ == nullptr) std::abort();
    for (int64_t n = problem.rows - 1; n >= 0; --n) {
      const RowSlots slots = row_slots(problem.support, n);
      if (slots.bad_extent) continue;
      for (int64_t j = 0; j < slots.count; ++j) owner_[slots.first + j] = n;
    }
  }

  int64_t* owner_ = nullptr;
};

// 2. Threads
// -------------------------------------------------------------------------------------------------

constexpr int64_t kSerialCost =
    20000;  // about 20 us of work: below it, waking threads costs more than it saves

// A growing thread-local buffer; memory is the row's, never the vocabulary's times the rows'.
template <typename T>
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  T* get(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = count + count / 2;
      data_ = static_cast<T*>(std::malloc(static_cast<size_t>(capacity_) * sizeof(T)));
      if (data_ == nullptr) std::abort();
    }
    return data_;
  }
  // Zeroed when it grows; the user leaves it zeroed.
  T* get_zeroed(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = count;
      data_ = static_cast<T*>(std::calloc(static_cast<size_t>(capacity_), sizeof(T)));
      if (data_ == nullptr) std::abort();
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

template <typename F>
void for_each_row(int64_t rows, int64_t cost, F f) {
  // Small ranges balance rows of unequal size; 64 rows are still well above the cost of taking a
  // range.
  int64_t grain = rows / (int64_t{num_threads()} * 8);
  grain = grain < 1 ? 1 : (grain > 64 ? 64 : grain);
  if (cost < kSerialCost) grain = rows;
  parallel_for(
      rows, grain,
      [](void* context, int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) (*static_cast<F*>(context))(n);
      },
      &f);
}

// Nanoseconds, roughly.
inline int64_t forward_cost(const Problem& problem) {
  const int64_t slots = slot_count(problem.support);
  const int64_t full = (problem.options & kFullVocab) != 0 ? problem.vocab_size : 0;
  return problem.rows * (100 + full) + slots * 2;
}

template <typename F>
void with_element_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBfloat16:
      return f(Bfloat16{});
    case DType::kFloat16:
      return f(Float16{});
  }
}

}  // namespace
}  // namespace topp
