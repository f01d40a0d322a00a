// A row's members: its slots, what is wrong with them, and whether ids can repeat.
#pragma once

#include <cstdint>

#include "contract.h"
#include "exact.h"

namespace topp {

TOPP_INLINE int64_t slot_count(const SupportView& support) {
  return support.pieces * support.capacity;
}

// The slots [begin, end) of row n inside its piece's `ids`, clamped to the piece: reading them is
// always safe.
struct RowSlots {
  const int32_t* ids;
  int64_t first;  // of slot `begin` among all slots of the problem
  int64_t count;
  bool bad_extent;
};

TOPP_INLINE RowSlots row_slots(const SupportView& support, int64_t n) {
  const int64_t piece = n / support.rows_per_piece;
  int64_t begin = 0;
  int64_t end = support.capacity;
  if (support.begins != nullptr) {
    begin = support.begins[n];
    end = support.ends[n];
  }
  RowSlots slots;
  slots.bad_extent = begin < 0 || end < begin || end > support.capacity;
  if (begin < 0) begin = 0;
  if (end > support.capacity) end = support.capacity;
  if (end < begin) end = begin = 0;
  slots.first = piece * support.capacity + begin;
  slots.ids = support.token_ids + slots.first;
  slots.count = end - begin;
  return slots;
}

// One look at every slot. `distinct` is only sure: the valid slots form one run and ascend
// strictly. Comparing neighbours alone would pass [5, -1, 5].
struct SlotScan {
  int64_t valid = 0;
  bool bad_id = false;
  bool distinct = true;
};

TOPP_INLINE SlotScan scan_slots(const RowSlots& slots, int64_t vocab_size) {
  SlotScan scan;
  int64_t last_valid = -1;
  int32_t last_id = -1;
  for (int64_t j = 0; j < slots.count; ++j) {
    const int32_t id = slots.ids[j];
    if (id < -1 || id >= vocab_size) scan.bad_id = true;
    if (id < 0) continue;
    if (id <= last_id || (scan.valid > 0 && last_valid != j - 1)) scan.distinct = false;
    last_valid = j;
    last_id = id;
    ++scan.valid;
  }
  return scan;
}

TOPP_INLINE bool is_member_id(int32_t id, int64_t vocab_size) { return id >= 0 && id < vocab_size; }

TOPP_INLINE bool is_usable_temperature(float t) { return t > 0.0f && bits_of(t) < 0x7f800000u; }

// Where row n starts, in elements.
TOPP_INLINE int64_t row_offset(const RowLayout& layout, int64_t n) {
  if (layout.rank == 1) return n * layout.stride[0];
  int64_t offset = 0;
  for (int d = layout.rank - 1; d >= 0; --d) {
    const int64_t rest = n / layout.shape[d];
    offset += (n - rest * layout.shape[d]) * layout.stride[d];
    n = rest;
  }
  return offset;
}

}  // namespace topp
