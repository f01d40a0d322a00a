// How a block of the CUDA backward writes a row: every byte once, in whole lines.
#pragma once

#include "logits_cuda.cuh"

namespace topp {
namespace {

constexpr int kThreads = 256;
constexpr int kLine = 128;  // bytes that words of the bit map are aligned to

// Which columns of the row hold members: bit `shift + id`, so that a word's columns lie in one
// line.
struct MemberBits {
  BitSet members;
  BitSet repeated;  // ids in more than one slot; only with member cotangents
  int shift;
  int64_t words;
  __device__ uint32_t word(int64_t w) const { return w < words ? members.words[w] : 0; }
};

template <typename T>
struct RowOutput {
  T* data;
  int64_t stride;
  int64_t columns;

  __device__ void set(int64_t id, float v) const { narrow(v, &data[id * stride]); }
  __device__ void zero(int64_t column) const { data[column * stride] = T{}; }
  __device__ int shift() const {
    if (stride != 1) return 0;
    return static_cast<int>((reinterpret_cast<uintptr_t>(data) & (kLine - 1)) / sizeof(T));
  }
};

// Zeros every word of columns without a member; kAll: every column.
template <bool kAll, typename T>
TOPP_DEVICE void zero_row(const RowOutput<T>& out, const MemberBits& bits) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  constexpr int kPacksPerWord = 32 / kPack;
  const int shift = out.shift();
  int64_t head = (kPack - shift % kPack) % kPack;
  if (head > out.columns || out.stride != 1) head = out.columns;
  const int64_t packs = (out.columns - head) / kPack;
  uint4* data = reinterpret_cast<uint4*>(out.data + head);
  int word = (static_cast<int>(threadIdx.x) + (static_cast<int>(head) + shift) / kPack) /
             kPacksPerWord;  // of the thread's pack
#pragma unroll 2
  for (int64_t p = threadIdx.x; p < packs; p += kThreads) {
    if (kAll || bits.word(word) == 0) __stcs(&data[p], make_uint4(0, 0, 0, 0));
    word += kThreads / kPacksPerWord;
  }
  const int64_t dense = packs * kPack;
  for (int64_t i = threadIdx.x; i < out.columns - dense; i += kThreads) {
    const int64_t column = i < head ? i : i + dense;
    if (kAll || bits.word((column + shift) >> 5) == 0) out.zero(column);
  }
}

// The word of `id`, if this id is the one that writes the word's zeros: its first member.
struct Neighbours {
  uint32_t word;
  int64_t column;  // of the word's first bit
  int place;       // of the id
  bool mine;
  __device__ Neighbours(const MemberBits& bits, int32_t id) {
    const int64_t bit = static_cast<int64_t>(id) + bits.shift;
    word = bits.members.words[bit >> 5];
    column = (bit & ~int64_t{31}) - bits.shift;
    place = static_cast<int>(bit & 31);
    mine = (word & ((1u << place) - 1u)) == 0;
  }
};

template <typename T>
TOPP_DEVICE void zero_neighbours(const RowOutput<T>& out, const Neighbours& near) {
  if (!near.mine) return;
  for (int b = 0; b < 32; ++b) {
    const int64_t column = near.column + b;
    if ((near.word >> b & 1u) == 0 && column >= 0 && column < out.columns) out.zero(column);
  }
}

// Writes a member's gradient and the zeros of its word, whole lines at once where it is alone.
template <typename T>
TOPP_DEVICE void set_with_neighbours(const RowOutput<T>& out, const MemberBits& bits, int32_t id,
                                     float v) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  const Neighbours near(bits, id);
  const bool alone = (near.word & (near.word - 1)) == 0;
  if (!alone || out.stride != 1 || near.column < 0 || near.column + 32 > out.columns) {
    zero_neighbours(out, near);
    out.set(id, v);
    return;
  }
  T value;
  narrow(v, &value);
  uint32_t raw = 0;
  std::memcpy(&raw, &value, sizeof value);
  const int byte = near.place * static_cast<int>(sizeof(T));
  raw <<= 8 * (byte & 3);
  uint4* line = reinterpret_cast<uint4*>(out.data + near.column);
#pragma unroll
  for (int p = 0; p < 32 / kPack; ++p) {
    const int at = (byte >> 2) - 4 * p;
    line[p] =
        make_uint4(at == 0 ? raw : 0, at == 1 ? raw : 0, at == 2 ? raw : 0, at == 3 ? raw : 0);
  }
}

}  // namespace
}  // namespace topp
