#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/gemm/gemm.h"
#include "cuda/kernels/ptx/copy.cuh"
#include "cuda/kernels/ptx/mbarrier.cuh"
#include "cuda/kernels/ptx/memory.cuh"
#include "cuda/kernels/ptx/mma.cuh"
#include "cuda/kernels/ptx/wgmma.cuh"

namespace glint::cuda {

constexpr int kFragmentRows = 16;
constexpr int kFragmentTokens = 8;
constexpr int kChunkBytes = 16;
constexpr int kCoreMatrixBytes = 128;
constexpr int kQuadChunks = 4;

template <GemmElement kElement>
struct MmaOperands {
  static constexpr bool kIsFp8 = kElement == GemmElement::kE4m3;
  static constexpr int kStepChunks = kIsFp8 ? 1 : 2;

  static __device__ __forceinline__ uint32_t low(uint32_t word) { return ptx::cvt_f16x2_e4m3x2_low(word); }
  static __device__ __forceinline__ uint32_t high(uint32_t word) { return ptx::cvt_f16x2_e4m3x2_high(word); }

  static __device__ __forceinline__ uint32_t lane_of_rows(uint32_t rows, uint32_t chunk_stride) {
    const uint32_t lane = threadIdx.x % 32;
    return rows + lane / 16 * chunk_stride + lane / 8 % 2 * kCoreMatrixBytes + lane % 8 * kChunkBytes;
  }

  static __device__ __forceinline__ ptx::FragmentA rows(const uint32_t (&r_words)[4], int step) {
    if constexpr (kIsFp8) {
      return {low(r_words[step * 2]), low(r_words[step * 2 + 1]), high(r_words[step * 2]), high(r_words[step * 2 + 1])};
    } else {
      return {r_words[0], r_words[1], r_words[2], r_words[3]};
    }
  }

  static __device__ __forceinline__ ptx::FragmentB tokens(const uint32_t* r_words, int step) {
    if constexpr (kIsFp8) {
      return {low(r_words[step]), high(r_words[step])};
    } else {
      return {r_words[step * 2], r_words[step * 2 + 1]};
    }
  }

  static __device__ __forceinline__ void multiply(float* r_sum, const ptx::FragmentA& rows,
                                                  const ptx::FragmentB& tokens) {
    if constexpr (kIsFp8) {
      ptx::mma_m16n8k16_f16(r_sum, rows, tokens.regs[0], tokens.regs[1]);
    } else {
      ptx::mma_m16n8k16_bf16(r_sum, rows, tokens.regs[0], tokens.regs[1]);
    }
  }
};

template <GemmElement kElement>
struct MmaQuad : MmaOperands<kElement> {
  using Operands = MmaOperands<kElement>;
  static constexpr int kSteps = kQuadChunks / Operands::kStepChunks;

  ptx::FragmentA r_rows[kSteps];

  __device__ __forceinline__ void load_rows(uint32_t lane_rows, uint32_t chunk_stride) {
#pragma unroll
    for (int pair = 0; pair < kQuadChunks / 2; ++pair) {
      uint32_t r_words[4];
      ptx::ldmatrix_x4(r_words, lane_rows + pair * 2 * chunk_stride);
#pragma unroll
      for (int step = 0; step < kSteps / 2; ++step) r_rows[pair * (kSteps / 2) + step] = Operands::rows(r_words, step);
    }
  }

  __device__ __forceinline__ void add_step(float* r_sum, const uint32_t (&r_tokens)[4], int step) const {
    Operands::multiply(r_sum, r_rows[step], Operands::tokens(r_tokens, step));
  }
};

template <GemmElement kElement, int kFragments, int kGroups>
struct MmaChunkPair {
  using Operands = MmaOperands<kElement>;
  static constexpr int kSteps = 2 / Operands::kStepChunks;
  static constexpr int kTokenMatrices = (kGroups + 1) / 2;

  uint32_t r_rows[kFragments][4];
  uint32_t r_tokens[kTokenMatrices][4];

  static __device__ __forceinline__ uint32_t lane_of_tokens(uint32_t tokens) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t token = lane / 16 * kFragmentTokens + lane % 8;
    return tokens + token * kGemmTileK + (lane / 8 % 2 ^ lane % 8) * kChunkBytes;
  }

  __device__ __forceinline__ void load(uint32_t lane_rows, uint32_t lane_tokens) {
#pragma unroll
    for (int fragment = 0; fragment < kFragments; ++fragment) {
      ptx::ldmatrix_x4(r_rows[fragment], lane_rows + fragment * 2 * kCoreMatrixBytes);
    }
#pragma unroll
    for (int matrix = 0; matrix < kTokenMatrices; ++matrix) {
      ptx::ldmatrix_x4(r_tokens[matrix], lane_tokens + matrix * 2 * kFragmentTokens * kGemmTileK);
    }
  }

  __device__ __forceinline__ void add_step(float (&r_sum)[kFragments * kGroups * 4], int step) const {
    ptx::FragmentA r_fragments[kFragments];
#pragma unroll
    for (int fragment = 0; fragment < kFragments; ++fragment) {
      r_fragments[fragment] = Operands::rows(r_rows[fragment], step);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const ptx::FragmentB tokens = Operands::tokens(r_tokens[group / 2] + group % 2 * 2, step);
#pragma unroll
      for (int fragment = 0; fragment < kFragments; ++fragment) {
        Operands::multiply(r_sum + (fragment * kGroups + group) * 4, r_fragments[fragment], tokens);
      }
    }
  }
};

template <int kCount>
__device__ __forceinline__ void clear_registers(float (&r_values)[kCount]) {
#pragma unroll
  for (int index = 0; index < kCount; ++index) r_values[index] = 0.0F;
}

template <Multiply kMultiply, GemmElement kElement, int kTokens>
struct StepMultiply;

template <GemmElement kElement, int kTokens>
struct StepMultiply<Multiply::kWgmma, kElement, kTokens> {
  using Wgmma = std::conditional_t<kElement == GemmElement::kE4m3, ptx::WgmmaE4m3<kTokens>, ptx::WgmmaBf16<kTokens>>;

  static __device__ __forceinline__ void acquire_copied_tokens() { ptx::fence_proxy_async(); }

  static __device__ __forceinline__ void start(float (&r_step)[kTokens / 2], const uint8_t* s_rows,
                                               const uint8_t* s_tokens) {
    const uint64_t rows = ptx::wgmma_descriptor(ptx::shared_address(s_rows), 8 * kCoreMatrixBytes, kCoreMatrixBytes);
    const uint64_t tokens =
        ptx::wgmma_descriptor_swizzle_128b(ptx::shared_address(s_tokens), 0, kFragmentTokens * kGemmTileK);
    ptx::wgmma_fence();
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      Wgmma::mma_async(r_step, rows + part * (2048 / 16), tokens + part * (32 / 16), part == 0 ? 0 : 1);
    }
    ptx::wgmma_commit_group();
  }

  template <int kPending>
  static __device__ __forceinline__ void wait(float (&r_step)[kTokens / 2]) {
    ptx::wgmma_wait_group<kPending>();
    ptx::pin_registers(r_step);
  }
};

template <GemmElement kElement, int kTokens>
struct StepMultiply<Multiply::kMmaSync, kElement, kTokens> {
  static __device__ __forceinline__ void acquire_copied_tokens() {}

  static __device__ __forceinline__ void start(float (&r_step)[kTokens / 2], const uint8_t* s_rows,
                                               const uint8_t* s_tokens) {
    constexpr int kChunkStride = 8 * kCoreMatrixBytes;
    constexpr int kQuads = kGemmTileK / kChunkBytes / kQuadChunks;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t fragment = threadIdx.x / 32 % 4 * 2 * kCoreMatrixBytes;
    const uint32_t rows = MmaQuad<kElement>::lane_of_rows(ptx::shared_address(s_rows) + fragment, kChunkStride);
    const uint32_t tokens = ptx::shared_address(s_tokens) + lane % 8 * kGemmTileK;
    clear_registers(r_step);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      MmaQuad<kElement> multiply;
      multiply.load_rows(rows + quad * kQuadChunks * kChunkStride, kChunkStride);
      const uint32_t chunk = ((quad * kQuadChunks + lane / 8) ^ lane % 8) * kChunkBytes;
#pragma unroll
      for (int group = 0; group < kTokens / kFragmentTokens; ++group) {
        uint32_t r_tokens[4];
        ptx::ldmatrix_x4(r_tokens, tokens + chunk + group * kFragmentTokens * kGemmTileK);
#pragma unroll
        for (int step = 0; step < multiply.kSteps; ++step) multiply.add_step(r_step + group * 4, r_tokens, step);
      }
    }
  }

  template <int kPending>
  static __device__ __forceinline__ void wait(float (&)[kTokens / 2]) {}
};

template <Multiply kMultiply, int kTokens, int kRows, int kBytesOfK>
struct HalvesMultiply;

template <int kTokens, int kRows, int kBytesOfK>
struct HalvesMultiply<Multiply::kWgmma, kTokens, kRows, kBytesOfK> {
  static constexpr int kSteps = kBytesOfK / 32;

  static __device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t units) {
    return (descriptor & ~uint64_t{0xffffffffU}) | (static_cast<uint32_t>(descriptor) + units);
  }

  static __device__ __forceinline__ void run(float (&r_first)[kTokens / 2], float (&r_second)[kTokens / 2],
                                             const uint8_t* s_rows, const uint8_t* s_tokens, int count) {
    using Wgmma = ptx::WgmmaE4m3<kTokens>;
    const uint64_t rows = ptx::wgmma_descriptor(ptx::shared_address(s_rows), kRows * kChunkBytes, kCoreMatrixBytes);
    const uint64_t tokens = ptx::wgmma_descriptor(ptx::shared_address(s_tokens), count * kChunkBytes, kCoreMatrixBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t row_part = advance(rows, step * 2 * kRows);
      const uint64_t token_part = advance(tokens, step * count * 2);
      if (step < kSteps / 2) {
        Wgmma::mma_async(r_first, row_part, token_part, step == 0 ? 0 : 1);
      } else {
        Wgmma::mma_async(r_second, row_part, token_part, step == kSteps / 2 ? 0 : 1);
      }
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin_registers(r_first);
    ptx::pin_registers(r_second);
  }
};

template <int kTokens, int kRows, int kBytesOfK>
struct HalvesMultiply<Multiply::kMmaSync, kTokens, kRows, kBytesOfK> {
  static constexpr int kChunks = kBytesOfK / kChunkBytes;
  static_assert(kChunks % kQuadChunks == 0, "K is made of quads of chunks");

  static __device__ __forceinline__ void run(float (&r_first)[kTokens / 2], float (&r_second)[kTokens / 2],
                                             const uint8_t* s_rows, const uint8_t* s_tokens, int count) {
    constexpr int kChunkStride = kRows * kChunkBytes;
    using Quad = MmaQuad<GemmElement::kE4m3>;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32 % 4;
    clear_registers(r_first);
    clear_registers(r_second);
    if (warp * kFragmentRows >= kRows) return;
    const uint32_t rows = Quad::lane_of_rows(ptx::shared_address(s_rows) + warp * 2 * kCoreMatrixBytes, kChunkStride);
    const uint32_t tokens = ptx::shared_address(s_tokens) + lane / 8 * count * kChunkBytes + lane % 8 * kChunkBytes;
#pragma unroll
    for (int quad = 0; quad < kChunks / kQuadChunks; ++quad) {
      Quad multiply;
      multiply.load_rows(rows + quad * kQuadChunks * kChunkStride, kChunkStride);
#pragma unroll
      for (int group = 0; group < kTokens / kFragmentTokens; ++group) {
        uint32_t r_tokens[4];
        ptx::ldmatrix_x4(r_tokens, tokens + (quad * kQuadChunks * count + group * kFragmentTokens) * kChunkBytes);
#pragma unroll
        for (int step = 0; step < Quad::kSteps; ++step) {
          const bool is_first = quad * kQuadChunks + step < kChunks / 2;
          multiply.add_step((is_first ? r_first : r_second) + group * 4, r_tokens, step);
        }
      }
    }
  }
};

}
