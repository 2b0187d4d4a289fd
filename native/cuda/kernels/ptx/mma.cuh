#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace glint::cuda::ptx {

struct FragmentA {
  uint32_t regs[4];
};

struct FragmentB {
  uint32_t regs[2];
};

struct FragmentC {
  float values[4];
};

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&regs)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(regs[0]), "=r"(regs[1]), "=r"(regs[2]), "=r"(regs[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&regs)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(regs[0]), "=r"(regs[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&regs)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(regs[0]), "=r"(regs[1]), "=r"(regs[2]), "=r"(regs[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&regs)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(regs[0]), "=r"(regs[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void mma_m16n8k16_f16(float* r_sum, const FragmentA& left, uint32_t right_low,
                                                 uint32_t right_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(r_sum[0]), "+f"(r_sum[1]), "+f"(r_sum[2]), "+f"(r_sum[3])
      : "r"(left.regs[0]), "r"(left.regs[1]), "r"(left.regs[2]), "r"(left.regs[3]), "r"(right_low), "r"(right_high));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float* r_sum, const FragmentA& left, uint32_t right_low,
                                                  uint32_t right_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(r_sum[0]), "+f"(r_sum[1]), "+f"(r_sum[2]), "+f"(r_sum[3])
      : "r"(left.regs[0]), "r"(left.regs[1]), "r"(left.regs[2]), "r"(left.regs[3]), "r"(right_low), "r"(right_high));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(FragmentC& sum, const FragmentA& left, uint32_t right_low,
                                                  uint32_t right_high) {
  mma_m16n8k16_bf16(sum.values, left, right_low, right_high);
}

__device__ __forceinline__ void mma_m16n8k16_f16(FragmentC& sum, const FragmentA& left, const FragmentB& right) {
  mma_m16n8k16_f16(sum.values, left, right.regs[0], right.regs[1]);
}

__device__ __forceinline__ void wait_for_sum(float sum) {
  constexpr uint32_t kNanOfNoProduct = 0x7fc12345U;
  if (__float_as_uint(sum) == kNanOfNoProduct) __trap();
}

__device__ __forceinline__ void wait_for_bits(uint32_t bits) {
  constexpr uint32_t kBitsOfNoValue = 0x00010001U;
  if (bits == kBitsOfNoValue) __trap();
}

__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t values) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(values));
  return halves;
}

__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2_low(uint32_t word) {
  uint32_t halves;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n"
      : "=r"(halves)
      : "r"(word));
  return halves;
}

__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2_high(uint32_t word) {
  uint32_t halves;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}\n"
      : "=r"(halves)
      : "r"(word));
  return halves;
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t left, uint32_t right) {
  uint32_t products;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(left), "r"(right));
  return products;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float ex2_approx(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float rcp_approx(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

}
