// The member cotangents of a row of the CUDA backward, and which of its slots earlier rows own.
#pragma once

#include "row_output.cuh"

namespace topp {
namespace {

struct Job {
  Problem problem;
  SavedRows saved;
  Cotangents cotangents;
  GradientView gradient;
  int64_t rows_per_block;
  int64_t words;  // of one bit map
  bool in_place;  // the gradient's memory is the logits', row by row
};

TOPP_DEVICE bool holds_slots(const SupportView& support, int64_t n) {
  return support.begins[n] >= 0 && support.begins[n] < support.ends[n] &&
         support.ends[n] <= support.capacity;
}

// The member cotangents of row n. Slots that an earlier row of the piece covers carry none.
struct MemberCotangents {
  const Job& job;
  const Row& row;
  int64_t n;
  int64_t first_row;  // of the piece
  bool contested;     // an earlier row covers some of the slots

  __device__ bool owns(int64_t j) const {
    if (row.slots.bad_extent) return false;
    if (!contested) return true;
    const SupportView& support = job.problem.support;
    const int64_t place = support.begins[n] + j;
    for (int64_t m = first_row; m < n; ++m) {
      if (holds_slots(support, m) && support.begins[m] <= place && place < support.ends[m]) {
        return false;
      }
    }
    return true;
  }
  __device__ double at(int64_t j) const {
    if (row.id(job.problem, j) == -1 || !owns(j)) return 0.0;
    return static_cast<double>(job.cotangents.members[row.slots.first + j]);
  }
  // Of every slot that holds the id, in slot order.
  __device__ double total(int32_t id) const {
    double total = 0.0;
    for (int64_t j = 0; j < row.slots.count; ++j) {
      if (row.id(job.problem, j) == id) total += at(j);
    }
    return total;
  }
  // By one warp, in the order of LaneSum.
  __device__ double sum() const {
    double sum = 0.0;
#pragma unroll 4
    for (int64_t j = threadIdx.x % kWarp; j < row.slots.count; j += kWarp) sum += at(j);
    return reduce_lanes<kWarp>(sum, Sum{});
  }
};

struct BlockScratch {
  int32_t reach[kThreads / kWarp];
  RowGradient gradient;  // of the row at hand: in registers, it would halve the blocks that fit
};

// Tells whether earlier rows of a piece cover a row's slots. Rows that stand one behind the other
// only need how far those before reach, which a block carries from row to row; looking at all
// earlier rows is left for the first row of a block and for rows out of order.
class SlotOwners {
 public:
  __device__ SlotOwners(const SupportView& support, BlockScratch* scratch)
      : support_(support), scratch_(scratch) {}

  // By the whole block, for rows in ascending order; `first_row` is the piece's.
  __device__ bool contested(int64_t n, int64_t first_row, bool first_of_block) {
    if (support_.begins == nullptr) return false;
    if (first_of_block) {
      reach_ = reach_before(n, first_row);
    } else if (n == first_row) {
      reach_ = 0;
    }
    if (!holds_slots(support_, n)) return false;
    const bool behind = support_.begins[n] >= reach_;
    if (reach_ < support_.ends[n]) reach_ = support_.ends[n];
    return !behind && overlaps(n, first_row);
  }

 private:
  __device__ int32_t reach_before(int64_t n, int64_t first_row) const {
    int32_t reach = 0;
#pragma unroll 4
    for (int64_t m = first_row + threadIdx.x; m < n; m += kThreads) {
      if (holds_slots(support_, m)) reach = Max{}(reach, support_.ends[m]);
    }
    return reduce_block<kThreads>(reach, Max{}, scratch_->reach);
  }

  __device__ bool overlaps(int64_t n, int64_t first_row) const {
    const int32_t begin = support_.begins[n];
    const int32_t end = support_.ends[n];
    bool found = false;
#pragma unroll 4
    for (int64_t m = first_row + threadIdx.x; m < n; m += kThreads) {
      found |= holds_slots(support_, m) && support_.begins[m] < end && support_.ends[m] > begin;
    }
    return __syncthreads_or(found) != 0;
  }

  const SupportView& support_;
  BlockScratch* scratch_;
  int32_t reach_ = 0;
};

}  // namespace
}  // namespace topp
