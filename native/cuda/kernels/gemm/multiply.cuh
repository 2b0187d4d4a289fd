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
constexpr int kMmaPartBytes = 192;

__device__ __forceinline__ ptx::FragmentA fragment_of_fp8(uint32_t above, uint32_t below) {
  return {ptx::cvt_f16x2_e4m3x2_low(above), ptx::cvt_f16x2_e4m3x2_low(below), ptx::cvt_f16x2_e4m3x2_high(above),
          ptx::cvt_f16x2_e4m3x2_high(below)};
}

__device__ __forceinline__ void add_fp8_product(float* r_sum, const ptx::FragmentA& rows, uint32_t columns) {
  ptx::mma_m16n8k16_f16(r_sum, rows, ptx::cvt_f16x2_e4m3x2_low(columns), ptx::cvt_f16x2_e4m3x2_high(columns));
}

template <GemmElement kElement>
struct MmaOperands {
  static constexpr bool kIsFp8 = kElement == GemmElement::kE4m3;
  static constexpr int kStepChunks = kIsFp8 ? 1 : 2;

  static __device__ __forceinline__ uint32_t lane_of_rows(uint32_t rows, uint32_t chunk_stride) {
    const uint32_t lane = threadIdx.x % 32;
    return rows + lane / 16 * chunk_stride + lane / 8 % 2 * kCoreMatrixBytes + lane % 8 * kChunkBytes;
  }

  static __device__ __forceinline__ ptx::FragmentA rows(const uint32_t (&r_words)[4], int step) {
    if constexpr (kIsFp8) {
      return fragment_of_fp8(r_words[step * 2], r_words[step * 2 + 1]);
    } else {
      return {r_words[0], r_words[1], r_words[2], r_words[3]};
    }
  }

  static __device__ __forceinline__ ptx::FragmentB tokens(const uint32_t* r_words, int step) {
    if constexpr (kIsFp8) {
      return {ptx::cvt_f16x2_e4m3x2_low(r_words[step]), ptx::cvt_f16x2_e4m3x2_high(r_words[step])};
    } else {
      return {r_words[step * 2], r_words[step * 2 + 1]};
    }
  }

  static __device__ __forceinline__ uint32_t loaded_bits(uint32_t word) {
    return kIsFp8 ? ptx::cvt_f16x2_e4m3x2_low(word) : ptx::mul_bf16x2(word, 0);
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

  __device__ __forceinline__ void wait_until_loaded() const {
    uint32_t bits = 0;
#pragma unroll
    for (int fragment = 0; fragment < kFragments; ++fragment) bits |= Operands::loaded_bits(r_rows[fragment][3]);
#pragma unroll
    for (int matrix = 0; matrix < kTokenMatrices; ++matrix) bits |= Operands::loaded_bits(r_tokens[matrix][3]);
    ptx::wait_for_bits(bits);
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

template <int kCount>
__device__ __forceinline__ void add_registers(float (&r_sum)[kCount], const float (&r_values)[kCount]) {
#pragma unroll
  for (int index = 0; index < kCount; ++index) r_sum[index] = __fadd_rn(r_sum[index], r_values[index]);
}

template <int kCount>
__device__ __forceinline__ void wait_for_sums(const float (&r_sums)[kCount]) {
  float sum = r_sums[kCount - 1];
#pragma unroll
  for (int index = kCount - 5; index >= 0; index -= 4) sum = __fadd_rn(sum, r_sums[index]);
  ptx::wait_for_sum(sum);
  __syncwarp();
}

template <Multiply kMultiply, GemmElement kElement, int kTokens>
struct StepMultiply;

template <GemmElement kElement, int kTokens>
struct StepMultiply<Multiply::kWgmma, kElement, kTokens> {
  using Wgmma = std::conditional_t<kElement == GemmElement::kE4m3, ptx::WgmmaE4m3<kTokens>, ptx::WgmmaBf16<kTokens>>;

  static __device__ __forceinline__ void acquire_copied_tokens() { ptx::fence_proxy_async(); }

  template <int kParts = kGemmTileK / 32>
  static __device__ __forceinline__ void start(float (&r_step)[kTokens / 2], const uint8_t* s_rows,
                                               const uint8_t* s_tokens) {
    const uint64_t rows = ptx::wgmma_descriptor(ptx::shared_address(s_rows), 8 * kCoreMatrixBytes, kCoreMatrixBytes);
    const uint64_t tokens =
        ptx::wgmma_descriptor_swizzle_128b(ptx::shared_address(s_tokens), 0, kFragmentTokens * kGemmTileK);
    ptx::wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Wgmma::mma_async(r_step, rows + part * (2048 / 16), tokens + part * (32 / 16), part == 0 ? 0 : 1);
    }
    ptx::wgmma_commit_group();
  }

  template <int kPending>
  static __device__ __forceinline__ void wait(float (&r_step)[kTokens / 2]) {
    ptx::wgmma_wait_group<kPending>();
    ptx::pin_registers(r_step);
  }

  static __device__ __forceinline__ void release(uint64_t& s_released, const float (&)[kTokens / 2]) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_released);
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

  static __device__ __forceinline__ void release(uint64_t& s_released, const float (&r_step)[kTokens / 2]) {
    wait_for_sums(r_step);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_released);
  }
};

template <int kBytesOfK>
struct WgmmaSteps {
  static constexpr int kSteps = kBytesOfK / 32;
  static constexpr int kParts = (kBytesOfK + 127) / 128;
  static constexpr int kPartSteps = (kSteps + kParts - 1) / kParts;
  static_assert(kBytesOfK % 32 == 0, "K is made of steps of 32 bytes");

  static constexpr __device__ bool starts_part(int step) { return step % kPartSteps == 0; }
  static constexpr __device__ bool is_odd_part(int step) { return step / kPartSteps % 2 != 0; }
  static constexpr __device__ bool is_first_pair(int step) { return step < 2 * kPartSteps; }
  static constexpr __device__ bool is_last(int step) { return step + 1 == kSteps; }
  static constexpr __device__ bool ends_pair(int step) {
    return is_last(step) || (is_odd_part(step) && starts_part(step + 1));
  }
};

template <int kCount>
struct WgmmaParts {
  float r_even[kCount];
  float r_odd[kCount];

  __device__ __forceinline__ void wait(bool has_odd) {
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin_registers(r_even);
    if (has_odd) ptx::pin_registers(r_odd);
  }

  __device__ __forceinline__ void add_to(float (&r_sum)[kCount], bool is_first, bool has_odd) const {
#pragma unroll
    for (int index = 0; index < kCount; ++index) {
      const float sum = is_first ? r_even[index] : __fadd_rn(r_sum[index], r_even[index]);
      r_sum[index] = has_odd ? __fadd_rn(sum, r_odd[index]) : sum;
    }
  }
};

template <Multiply kMultiply, int kTokens, int kRows, int kBytesOfK>
struct TileMultiply;

template <int kTokens, int kRows, int kBytesOfK>
struct TileMultiply<Multiply::kWgmma, kTokens, kRows, kBytesOfK> {
  using Steps = WgmmaSteps<kBytesOfK>;

  static __device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t units) {
    return (descriptor & ~uint64_t{0xffffffffU}) | (static_cast<uint32_t>(descriptor) + units);
  }

  static __device__ __forceinline__ void add(float (&r_sum)[kTokens / 2], const uint8_t* s_rows,
                                             const uint8_t* s_tokens, int count) {
    using Wgmma = ptx::WgmmaE4m3<kTokens>;
    const uint64_t rows = ptx::wgmma_descriptor(ptx::shared_address(s_rows), kRows * kChunkBytes, kCoreMatrixBytes);
    const uint64_t tokens = ptx::wgmma_descriptor(ptx::shared_address(s_tokens), count * kChunkBytes, kCoreMatrixBytes);
    WgmmaParts<kTokens / 2> parts;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Steps::kSteps; ++step) {
      const bool is_odd = Steps::is_odd_part(step);
      Wgmma::mma_async(is_odd ? parts.r_odd : parts.r_even, advance(rows, step * 2 * kRows),
                       advance(tokens, step * count * 2), Steps::starts_part(step) ? 0 : 1);
      if (!Steps::ends_pair(step)) continue;
      parts.wait(is_odd);
      parts.add_to(r_sum, false, is_odd);
      if (!Steps::is_last(step)) ptx::wgmma_fence();
    }
  }
};

template <int kTokens, int kRows, int kBytesOfK>
struct TileMultiply<Multiply::kMmaSync, kTokens, kRows, kBytesOfK> {
  static constexpr int kGroupsAtOnce = kTokens < 16 ? 1 : 2;
  static constexpr int kPairs = kBytesOfK / (2 * kChunkBytes);
  static constexpr int kPartPairs = kMmaPartBytes / (2 * kChunkBytes);
  static_assert(kBytesOfK % (2 * kChunkBytes) == 0, "ldmatrix loads pairs of chunks");

  static __device__ __forceinline__ void load_tokens(uint32_t (&r_words)[2 * kGroupsAtOnce], uint32_t address) {
    if constexpr (kGroupsAtOnce == 1) {
      ptx::ldmatrix_x2(r_words, address);
    } else {
      ptx::ldmatrix_x4(r_words, address);
    }
  }

  static __device__ __forceinline__ void add(float (&r_sum)[kTokens / 2], const uint8_t* s_rows,
                                             const uint8_t* s_tokens, int count) {
    constexpr int kChunkStride = kRows * kChunkBytes;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32 % 4;
    if (warp * kFragmentRows >= kRows) return;
    const uint32_t token = lane % (kGroupsAtOnce * kFragmentTokens);
    const uint32_t chunk = lane / (kGroupsAtOnce * kFragmentTokens) % 2;
    const uint32_t rows = MmaQuad<GemmElement::kE4m3>::lane_of_rows(
        ptx::shared_address(s_rows) + warp * 2 * kCoreMatrixBytes, kChunkStride);
    uint32_t tokens = ptx::shared_address(s_tokens) + (chunk * count + token) * kChunkBytes;
    float r_part[kTokens / 2];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (pair % kPartPairs == 0) clear_registers(r_part);
      uint32_t r_words[4];
      ptx::ldmatrix_x4(r_words, rows + pair * 2 * kChunkStride);
      const ptx::FragmentA r_rows[2] = {fragment_of_fp8(r_words[0], r_words[1]),
                                        fragment_of_fp8(r_words[2], r_words[3])};
#pragma unroll
      for (int first = 0; first < kTokens / kFragmentTokens; first += kGroupsAtOnce) {
        uint32_t r_tokens[2 * kGroupsAtOnce];
        load_tokens(r_tokens, tokens + first * kFragmentTokens * kChunkBytes);
#pragma unroll
        for (int index = 0; index < 2 * kGroupsAtOnce; ++index) {
          add_fp8_product(r_part + (first + index % kGroupsAtOnce) * 4, r_rows[index / kGroupsAtOnce], r_tokens[index]);
        }
      }
      tokens += 2 * count * kChunkBytes;
      if ((pair + 1) % kPartPairs == 0 || pair + 1 == kPairs) add_registers(r_sum, r_part);
    }
    wait_for_sums(r_sum);
  }
};

template <Multiply kMultiply, int kRows, int kBytesOfK, int kWarpFragments>
struct TokenFragmentsMultiply;

template <int kRows, int kBytesOfK>
struct TokenFragmentsMultiply<Multiply::kWgmma, kRows, kBytesOfK, 1> {
  using Steps = WgmmaSteps<kBytesOfK>;

  template <bool kIsWholeK, class Released>
  static __device__ __forceinline__ void run(float (&r_sums)[1][kRows / 2], bool is_first, int,
                                             const uint4 (&r_tokens)[1][Steps::kSteps], uint32_t s_rows,
                                             const Released& when_released) {
    using Wgmma = ptx::WgmmaRegisterE4m3<kRows>;
    constexpr int kColumnBytes = kRows * kChunkBytes;
    const auto low = static_cast<uint32_t>(ptx::wgmma_descriptor(s_rows, kColumnBytes, kCoreMatrixBytes));
    WgmmaParts<kRows / 2> parts;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Steps::kSteps; ++step) {
      const bool is_odd = Steps::is_odd_part(step);
      const uint64_t columns = uint64_t{kCoreMatrixBytes / 16} << 32U | (low + step * (2 * kColumnBytes / 16));
      Wgmma::mma_async(is_odd ? parts.r_odd : parts.r_even, r_tokens[0][step], columns,
                       Steps::starts_part(step) ? 0 : 1);
      if (!Steps::ends_pair(step)) continue;
      parts.wait(is_odd);
      if (Steps::is_last(step)) when_released();
      parts.add_to(r_sums[0], is_first && Steps::is_first_pair(step), is_odd);
      if (!Steps::is_last(step)) ptx::wgmma_fence();
    }
  }
};

template <int kRows, int kBytesOfK, int kWarpFragments>
struct TokenFragmentsMultiply<Multiply::kMmaSync, kRows, kBytesOfK, kWarpFragments> {
  static constexpr int kSteps = kBytesOfK / 32;
  static constexpr int kPartSteps = kMmaPartBytes / 32;
  static constexpr int kChunkStride = kRows * kChunkBytes;
  static_assert(kPartSteps % 2 == 0, "a part is made of quads of chunks");

  using Sums = float[kWarpFragments][kRows / 2];
  using Tokens = uint4[kWarpFragments][kSteps];

  template <int kUsed, int kFirst, int kQuadSteps>
  static __device__ __forceinline__ uint32_t add_products(Sums& r_parts, const Tokens& r_tokens, uint32_t s_rows) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t columns =
        s_rows + (kFirst * 2 + lane / 8 % (2 * kQuadSteps)) * kChunkStride + lane % 8 * kChunkBytes;
    ptx::FragmentA r_fragments[kUsed][2 * kQuadSteps];
#pragma unroll
    for (int index = 0; index < kUsed * kQuadSteps; ++index) {
      const uint4& words = r_tokens[index / kQuadSteps][kFirst + index % kQuadSteps];
      r_fragments[index / kQuadSteps][index % kQuadSteps * 2] = fragment_of_fp8(words.x, words.y);
      r_fragments[index / kQuadSteps][index % kQuadSteps * 2 + 1] = fragment_of_fp8(words.z, words.w);
    }
    uint32_t loaded = 0;
#pragma unroll
    for (int group = 0; group < kRows / 8; ++group) {
      uint32_t r_weights[4];
      ptx::ldmatrix_x4(r_weights, columns + group * kCoreMatrixBytes);
      loaded |= MmaOperands<GemmElement::kE4m3>::loaded_bits(r_weights[0]);
#pragma unroll
      for (int chunk = 0; chunk < 2 * kQuadSteps; ++chunk) {
        const ptx::FragmentB r_columns = {ptx::cvt_f16x2_e4m3x2_low(r_weights[chunk]),
                                          ptx::cvt_f16x2_e4m3x2_high(r_weights[chunk])};
#pragma unroll
        for (int fragment = 0; fragment < kUsed; ++fragment) {
          ptx::mma_m16n8k16_f16(r_parts[fragment] + group * 4, r_fragments[fragment][chunk], r_columns.regs[0],
                                r_columns.regs[1]);
        }
      }
    }
    return loaded;
  }

  template <bool kIsWholeK, int kUsed, int kFirst>
  static __device__ __forceinline__ void add_quad(Sums& r_sums, Sums& r_parts, const Tokens& r_tokens,
                                                  uint32_t s_rows) {
    constexpr int kQuadSteps = kSteps - kFirst < 2 ? 1 : 2;
    constexpr int kNext = kFirst + kQuadSteps;
    constexpr bool kIsSum = kIsWholeK && kFirst < kPartSteps;
    Sums& r_targets = kIsSum ? r_sums : r_parts;
#pragma unroll
    for (int fragment = 0; fragment < kUsed; ++fragment) {
      if constexpr (kFirst % kPartSteps == 0) clear_registers(r_targets[fragment]);
    }
    const uint32_t loaded = add_products<kUsed, kFirst, kQuadSteps>(r_targets, r_tokens, s_rows);
#pragma unroll
    for (int fragment = 0; fragment < kUsed; ++fragment) {
      if constexpr (!kIsSum && (kNext % kPartSteps == 0 || kNext == kSteps)) {
        add_registers(r_sums[fragment], r_parts[fragment]);
      }
    }
    if constexpr (kNext < kSteps) {
      add_quad<kIsWholeK, kUsed, kNext>(r_sums, r_parts, r_tokens, s_rows);
    } else {
      ptx::wait_for_bits(loaded);
    }
  }

  template <bool kIsWholeK, class Released>
  static __device__ __forceinline__ void run(Sums& r_sums, bool is_first, int num_used, const Tokens& r_tokens,
                                             uint32_t s_rows, const Released& when_released) {
    Sums r_parts;
#pragma unroll
    for (int fragment = 0; fragment < kWarpFragments; ++fragment) {
      if (is_first && !(kIsWholeK && fragment < num_used)) clear_registers(r_sums[fragment]);
    }
    if (num_used == 1) add_quad<kIsWholeK, 1, 0>(r_sums, r_parts, r_tokens, s_rows);
    if constexpr (kWarpFragments == 2) {
      if (num_used == 2) add_quad<kIsWholeK, 2, 0>(r_sums, r_parts, r_tokens, s_rows);
    }
    __syncwarp();
    when_released();
  }
};

}
