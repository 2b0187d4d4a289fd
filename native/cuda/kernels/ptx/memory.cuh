#pragma once

#include <cstdint>

#include "cuda/kernels/ptx/mbarrier.cuh"

namespace glint::cuda::ptx {

__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* g_value) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(g_value) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* g_value) {
  uint32_t value = 0;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(g_value) : "memory");
  return value;
}

__device__ __forceinline__ void st_release_sys(uint32_t* g_value, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(g_value), "r"(value) : "memory");
}

__device__ __forceinline__ int4 ld_relaxed_gpu(const int4* g_values) {
  int4 values;
  asm volatile("ld.relaxed.gpu.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
               : "l"(g_values));
  return values;
}

__device__ __forceinline__ float4 ld_relaxed_gpu(const float* g_values) {
  float4 values;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "l"(g_values)
               : "memory");
  return values;
}

__device__ __forceinline__ void st_relaxed_gpu(float* g_value, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(g_value), "f"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_gpu_if(bool is_stored, float* g_value, float value) {
  asm volatile(
      "{\n.reg .pred is_stored;\nsetp.ne.b32 is_stored, %2, 0;\n@is_stored st.relaxed.gpu.global.f32 [%0], %1;\n}\n" ::
          "l"(g_value),
      "f"(value), "r"(is_stored ? 1 : 0)
      : "memory");
}

__device__ __forceinline__ void st_relaxed_gpu(float* g_values, const float4& values) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(g_values), "f"(values.x), "f"(values.y),
               "f"(values.z), "f"(values.w)
               : "memory");
}

__device__ __forceinline__ void red_add_release_gpu(uint32_t* g_value, uint32_t amount) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(g_value), "r"(amount) : "memory");
}

__device__ __forceinline__ int atom_add_acq_rel_gpu(int32_t* g_value, int amount) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(g_value), "r"(amount) : "memory");
  return before;
}

__device__ __forceinline__ void ld_global_cg_if(bool is_loaded, uint4& r_target, const uint8_t* g_source) {
  asm volatile(
      "{\n.reg .pred is_loaded;\nsetp.ne.b32 is_loaded, %5, 0;\n"
      "@is_loaded ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "+r"(r_target.x), "+r"(r_target.y), "+r"(r_target.z), "+r"(r_target.w)
      : "l"(g_source), "r"(is_loaded ? 1 : 0));
}

__device__ __forceinline__ void ld_global_cg_if(bool is_loaded, uint32_t& r_target, const uint8_t* g_source) {
  asm volatile("{\n.reg .pred is_loaded;\nsetp.ne.b32 is_loaded, %2, 0;\n@is_loaded ld.global.cg.u32 %0, [%1];\n}\n"
               : "+r"(r_target)
               : "l"(g_source), "r"(is_loaded ? 1 : 0));
}

__device__ __forceinline__ void ld_global_nc_if(bool is_loaded, float2& r_target, const float* g_source) {
  asm volatile(
      "{\n.reg .pred is_loaded;\nsetp.ne.b32 is_loaded, %3, 0;\n@is_loaded ld.global.nc.v2.f32 {%0, %1}, [%2];\n}\n"
      : "+f"(r_target.x), "+f"(r_target.y)
      : "l"(g_source), "r"(is_loaded ? 1 : 0));
}

__device__ __forceinline__ float4 ld_shared_v4(uint32_t address) {
  float4 r;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

__device__ __forceinline__ float2 ld_shared_v2(uint32_t address) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
  return r;
}

__device__ __forceinline__ void st_shared_v4(uint32_t address, const float4& r) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(r.x), "f"(r.y), "f"(r.z), "f"(r.w)
               : "memory");
}

__device__ __forceinline__ void st_shared_v2(uint32_t address, const float2& r) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(r.x), "f"(r.y) : "memory");
}

__device__ __forceinline__ uint64_t ld_relaxed_shared(const uint64_t& s_value) {
  uint64_t value;
  asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];" : "=l"(value) : "r"(shared_address(&s_value)) : "memory");
  return value;
}

__device__ __forceinline__ void st_relaxed_cluster(uint64_t& s_value, uint32_t thread_block, uint64_t value) {
  asm volatile("st.relaxed.cluster.shared::cluster.u64 [%0], %1;" ::"r"(mapa(shared_address(&s_value), thread_block)),
               "l"(value)
               : "memory");
}

__device__ __forceinline__ void st_relaxed_cluster(uint32_t& s_value, uint32_t thread_block, uint32_t value) {
  asm volatile("st.relaxed.cluster.shared::cluster.u32 [%0], %1;" ::"r"(mapa(shared_address(&s_value), thread_block)),
               "r"(value)
               : "memory");
}

__device__ __forceinline__ void st_async(uint32_t target, const float* r_values, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
      "f"(r_values[0]), "f"(r_values[1]), "f"(r_values[2]), "f"(r_values[3]), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}
