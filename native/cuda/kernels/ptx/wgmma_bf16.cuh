#pragma once

#include <cstdint>

namespace glint::cuda {

inline constexpr uint64_t kSwizzle128 = uint64_t{1} << 62U;

__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address, uint32_t leading_bytes,
                                                        uint32_t stride_bytes) {
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3ffffU) >> 4U); };
  return field(address) | field(leading_bytes) << 16U | field(stride_bytes) << 32U | kSwizzle128;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kCount>
__device__ __forceinline__ void hold_registers(float (&r_values)[kCount]) {
#pragma unroll
  for (int index = 0; index < kCount; ++index) asm volatile("" : "+f"(r_values[index])::"memory");
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void wgmma_m64n64k16(float (&r_sums)[32], const uint32_t (&r_left)[4],
                                                        uint64_t right, int accumulates) {
  asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, accumulates, 1, 1, 0;\n}\n"
        : "+f"(r_sums[0]), "+f"(r_sums[1]), "+f"(r_sums[2]), "+f"(r_sums[3]), "+f"(r_sums[4]), "+f"(r_sums[5]),
          "+f"(r_sums[6]), "+f"(r_sums[7]), "+f"(r_sums[8]), "+f"(r_sums[9]), "+f"(r_sums[10]), "+f"(r_sums[11]),
          "+f"(r_sums[12]), "+f"(r_sums[13]), "+f"(r_sums[14]), "+f"(r_sums[15]), "+f"(r_sums[16]),
          "+f"(r_sums[17]), "+f"(r_sums[18]), "+f"(r_sums[19]), "+f"(r_sums[20]), "+f"(r_sums[21]),
          "+f"(r_sums[22]), "+f"(r_sums[23]), "+f"(r_sums[24]), "+f"(r_sums[25]), "+f"(r_sums[26]),
          "+f"(r_sums[27]), "+f"(r_sums[28]), "+f"(r_sums[29]), "+f"(r_sums[30]), "+f"(r_sums[31])
        : "r"(r_left[0]), "r"(r_left[1]), "r"(r_left[2]), "r"(r_left[3]), "l"(right), "r"(accumulates));
}

__device__ __forceinline__ void wgmma_m64n64k16_trans(float (&r_sums)[32], const uint32_t (&r_left)[4],
                                                        uint64_t right, int accumulates) {
  asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, accumulates, 1, 1, 1;\n}\n"
        : "+f"(r_sums[0]), "+f"(r_sums[1]), "+f"(r_sums[2]), "+f"(r_sums[3]), "+f"(r_sums[4]), "+f"(r_sums[5]),
          "+f"(r_sums[6]), "+f"(r_sums[7]), "+f"(r_sums[8]), "+f"(r_sums[9]), "+f"(r_sums[10]), "+f"(r_sums[11]),
          "+f"(r_sums[12]), "+f"(r_sums[13]), "+f"(r_sums[14]), "+f"(r_sums[15]), "+f"(r_sums[16]),
          "+f"(r_sums[17]), "+f"(r_sums[18]), "+f"(r_sums[19]), "+f"(r_sums[20]), "+f"(r_sums[21]),
          "+f"(r_sums[22]), "+f"(r_sums[23]), "+f"(r_sums[24]), "+f"(r_sums[25]), "+f"(r_sums[26]),
          "+f"(r_sums[27]), "+f"(r_sums[28]), "+f"(r_sums[29]), "+f"(r_sums[30]), "+f"(r_sums[31])
        : "r"(r_left[0]), "r"(r_left[1]), "r"(r_left[2]), "r"(r_left[3]), "l"(right), "r"(accumulates));
}

__device__ __forceinline__ void wgmma_m64n128k16_trans(float (&r_sums)[64], const uint32_t (&r_left)[4],
                                                        uint64_t right, int accumulates) {
  asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63"
        "}, {%64, %65, %66, %67}, %68, accumulates, 1, 1, 1;\n}\n"
        : "+f"(r_sums[0]), "+f"(r_sums[1]), "+f"(r_sums[2]), "+f"(r_sums[3]), "+f"(r_sums[4]), "+f"(r_sums[5]),
          "+f"(r_sums[6]), "+f"(r_sums[7]), "+f"(r_sums[8]), "+f"(r_sums[9]), "+f"(r_sums[10]), "+f"(r_sums[11]),
          "+f"(r_sums[12]), "+f"(r_sums[13]), "+f"(r_sums[14]), "+f"(r_sums[15]), "+f"(r_sums[16]),
          "+f"(r_sums[17]), "+f"(r_sums[18]), "+f"(r_sums[19]), "+f"(r_sums[20]), "+f"(r_sums[21]),
          "+f"(r_sums[22]), "+f"(r_sums[23]), "+f"(r_sums[24]), "+f"(r_sums[25]), "+f"(r_sums[26]),
          "+f"(r_sums[27]), "+f"(r_sums[28]), "+f"(r_sums[29]), "+f"(r_sums[30]), "+f"(r_sums[31]),
          "+f"(r_sums[32]), "+f"(r_sums[33]), "+f"(r_sums[34]), "+f"(r_sums[35]), "+f"(r_sums[36]),
          "+f"(r_sums[37]), "+f"(r_sums[38]), "+f"(r_sums[39]), "+f"(r_sums[40]), "+f"(r_sums[41]),
          "+f"(r_sums[42]), "+f"(r_sums[43]), "+f"(r_sums[44]), "+f"(r_sums[45]), "+f"(r_sums[46]),
          "+f"(r_sums[47]), "+f"(r_sums[48]), "+f"(r_sums[49]), "+f"(r_sums[50]), "+f"(r_sums[51]),
          "+f"(r_sums[52]), "+f"(r_sums[53]), "+f"(r_sums[54]), "+f"(r_sums[55]), "+f"(r_sums[56]),
          "+f"(r_sums[57]), "+f"(r_sums[58]), "+f"(r_sums[59]), "+f"(r_sums[60]), "+f"(r_sums[61]),
          "+f"(r_sums[62]), "+f"(r_sums[63])
        : "r"(r_left[0]), "r"(r_left[1]), "r"(r_left[2]), "r"(r_left[3]), "l"(right), "r"(accumulates));
}

}
