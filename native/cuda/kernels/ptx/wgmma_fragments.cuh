#pragma once

#include <cstdint>

namespace glint::cuda::hopper {

__device__ __forceinline__ void load_where(bool is_loaded, uint4& r_target, const uint8_t* g_source) {
  asm volatile(
      "{\n.reg .pred is_loaded;\nsetp.ne.b32 is_loaded, %5, 0;\n"
      "@is_loaded ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "+r"(r_target.x), "+r"(r_target.y), "+r"(r_target.z), "+r"(r_target.w)
      : "l"(g_source), "r"(is_loaded ? 1 : 0));
}

__device__ __forceinline__ void load_where(bool is_loaded, float2& r_target, const float* g_source) {
  asm volatile(
      "{\n.reg .pred is_loaded;\nsetp.ne.b32 is_loaded, %3, 0;\n@is_loaded ld.global.nc.v2.f32 {%0, %1}, [%2];\n}\n"
      : "+f"(r_target.x), "+f"(r_target.y)
      : "l"(g_source), "r"(is_loaded ? 1 : 0));
}

__device__ __forceinline__ void load_where(bool is_loaded, uint32_t& r_target, const uint8_t* g_source) {
  asm volatile("{\n.reg .pred is_loaded;\nsetp.ne.b32 is_loaded, %2, 0;\n@is_loaded ld.global.cg.u32 %0, [%1];\n}\n"
               : "+r"(r_target)
               : "l"(g_source), "r"(is_loaded ? 1 : 0));
}

__device__ __forceinline__ float4 load_shared_4(uint32_t address) {
  float4 r;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

__device__ __forceinline__ float2 load_shared_2(uint32_t address) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
  return r;
}

__device__ __forceinline__ void store_shared_4(uint32_t address, const float4& r) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(r.x), "f"(r.y), "f"(r.z), "f"(r.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_2(uint32_t address, const float2& r) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(r.x), "f"(r.y) : "memory");
}

__device__ __forceinline__ void multiply_fragments_by_40_rows(float (&r)[20], const uint4& fragment, uint64_t rows,
                                                              int accumulates) {
  asm volatile(
      "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %25, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n40k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
      "}, {%20, %21, %22, %23}, %24, accumulates, 1, 1;\n}\n"
      :
      "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]),
      "+f"(r[8]), "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]),
      "+f"(r[16]), "+f"(r[17]), "+f"(r[18]), "+f"(r[19])
      : "r"(fragment.x), "r"(fragment.y), "r"(fragment.z), "r"(fragment.w), "l"(rows), "r"(accumulates));
}

}
