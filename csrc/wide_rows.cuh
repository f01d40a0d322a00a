// Row results of wide rows, and of rows over the whole vocabulary: a block a row.
#pragma once

#include "forward_cuda.cuh"

namespace topp {
namespace {

constexpr int kTile = 4;  // members a thread holds at a time

struct BlockScratch {
  int32_t keys[kThreads / kWarp];
  int64_t sums[kThreads / kWarp];
};

// A wide row's members. `seen` takes a bit an id where ids may repeat; finding the maximum sets
// the bits, adding up clears them: either way one slot of an id counts.
template <typename T>
struct WideMembers {
  const Problem& problem;
  const Row& row;
  RowLogits<T> logits;
  int64_t end;  // of the slots, and one more if the target joins
  bool distinct;
  BitSet seen;

  template <bool kSetBits>
  __device__ void load(int64_t base, float (&x)[kTile]) const {
    int32_t id[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const int64_t j = base + i * kThreads + threadIdx.x;
      id[i] = j < end ? row.target : -1;
      if (j < row.slots.count) id[i] = row.id(problem, j);
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      if (distinct || id[i] < 0) continue;
      if (!(kSetBits ? seen.set(id[i]) : seen.clear(id[i]))) id[i] = -1;
    }
    load_members(logits, id, x);
  }

  // The first tile stays in `held`.
  __device__ int32_t key(float (&held)[kTile]) const {
    load<true>(0, held);
    int32_t key = kEmptyKey;
#pragma unroll
    for (int i = 0; i < kTile; ++i) key = Max{}(key, max_key(held[i]));
    for (int64_t base = kTile * kThreads; base < end; base += kTile * kThreads) {
      float x[kTile];
      load<true>(base, x);
#pragma unroll
      for (int i = 0; i < kTile; ++i) key = Max{}(key, max_key(x[i]));
    }
    return key;
  }

  __device__ RowSums sums(float m, float (&x)[kTile]) const {
    RowSums sums{0, 0};
    int64_t base = 0;
    // With bits to clear and several tiles, the first is read again: it holds bits of the others.
    if (!distinct && end > kTile * kThreads) load<false>(0, x);
    while (true) {
#pragma unroll
      for (int i = 0; i < kTile; ++i) add_member(x[i], m, &sums);
      base += kTile * kThreads;
      if (base >= end) return sums;
      load<false>(base, x);
    }
  }
};

// Every column below `columns`, by a block: f(x, count) for 16 bytes at a time where the row lies
// densely; what stands before and after is done singly.
template <typename T, typename F>
TOPP_DEVICE void for_each_column(const RowLogits<T>& logits, int64_t columns, F f) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  const int64_t misplaced = (reinterpret_cast<uintptr_t>(logits.data) & 15) / sizeof(T);
  int64_t head = (kPack - misplaced) % kPack;
  if (head > columns || logits.stride != 1) head = columns;
  const int64_t packs = (columns - head) / kPack;
  const uint4* data = reinterpret_cast<const uint4*>(logits.data + head);
#pragma unroll 2
  for (int64_t p = threadIdx.x; p < packs; p += kThreads) {
    const uint4 pack = data[p];
    T raw[kPack];
    std::memcpy(raw, &pack, sizeof pack);
    float x[kPack];
#pragma unroll
    for (int e = 0; e < kPack; ++e) x[e] = logits.scale(raw[e]);
    f(x);
  }
  const int64_t dense = packs * kPack;
  for (int64_t i = threadIdx.x; i < columns - dense; i += kThreads) {
    const float x[1] = {logits[i < head ? i : i + dense]};
    f(x);
  }
}

struct ColumnKey {
  int32_t* key;
  template <int kCount>
  __device__ void operator()(const float (&x)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) *key = Max{}(*key, max_key(x[e]));
  }
};

struct ColumnSums {
  float m;
  RowSums* sums;
  template <int kCount>
  __device__ void operator()(const float (&x)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) add_member(x[e], m, sums);
  }
};

template <typename T>
TOPP_DEVICE void score_wide(const Problem& problem, const Row& row, const RowFacts& facts,
                            int64_t n, BitSet seen, BlockScratch* scratch, ForwardRow* out) {
  const bool full_vocab = (problem.options & kFullVocab) != 0 && !facts.any_valid;
  const TargetPlan target = plan_target(problem, facts.has_target || full_vocab);
  const RowLogits<T> logits = row_logits<T>(problem, row, n);
  const WideMembers<T> members{
      problem, row, logits, row.slots.count + (target.added ? 1 : 0), facts.distinct, seen};
  if (!full_vocab && !facts.distinct)
    clear_words<kThreads>(seen.words, (problem.vocab_size + 31) / 32);
  float held[kTile];
  int32_t key = kEmptyKey;
  if (full_vocab) {
    for_each_column(logits, problem.vocab_size, ColumnKey{&key});
  } else {
    key = members.key(held);
  }
  key = reduce_block<kThreads>(key, Max{}, scratch->keys);
  if (!set_max(key, out)) return;
  RowSums sums{0, 0};
  if (full_vocab) {
    for_each_column(logits, problem.vocab_size, ColumnSums{out->max, &sums});
  } else {
    sums = members.sums(out->max, held);
  }
  out->sums.sum = reduce_block<kThreads>(sums.sum, Sum{}, scratch->sums);
  out->sums.weighted = reduce_block<kThreads>(sums.weighted, Sum{}, scratch->sums);
  set_target(target, target.wanted ? logits[row.target] : 0.0f, out);
}

template <typename T>
TOPP_DEVICE void wide_row(const Problem& problem, const ForwardResult& result, int64_t n,
                          BitSet seen, BlockScratch* scratch) {
  const Row row = open_row(problem, n);
  LaneScan scan;
#pragma unroll 4
  for (int64_t j = threadIdx.x; j < row.slots.count; j += kThreads) {
    scan.look(row.id(problem, j), j > 0 ? row.id(problem, j - 1) : -1, row.target,
              problem.vocab_size);
  }
  const RowFacts facts = agree<BlockTeam>(scan);
  ForwardRow out{planned_status(problem, row, facts), 0.0f, 0.0f, {0, 0}};
  if (out.status == kScored) score_wide<T>(problem, row, facts, n, seen, scratch, &out);
  if (threadIdx.x == 0) store_row(out, result, n);
}

}  // namespace
}  // namespace topp
