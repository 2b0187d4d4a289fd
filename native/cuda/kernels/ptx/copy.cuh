#pragma once

#include <cuda.h>

#include "cuda/kernels/ptx/mbarrier.cuh"

namespace glint::cuda::ptx {

constexpr uint64_t kEvictNormal = 0x1000000000000000ULL;
constexpr uint64_t kEvictFirst = 0x12f0000000000000ULL;

__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ const uint8_t* kept_address(const uint8_t* g_source) {
  asm volatile("" : "+l"(g_source));
  return g_source;
}

__device__ __forceinline__ void cp_async(uint32_t s_target, const void* g_source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s_target), "l"(g_source) : "memory");
}

__device__ __forceinline__ void cp_async(const void* s_target, const void* g_source) {
  cp_async(shared_address(s_target), g_source);
}

__device__ __forceinline__ void cp_async_zfill(const void* s_target, const void* g_source, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(s_target)), "l"(g_source),
               "r"(source_bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t& s_barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&s_barrier)) : "memory");
}

__device__ __forceinline__ void cp_async_bulk(void* s_target, const void* g_source, uint32_t bytes, uint64_t& s_barrier,
                                              uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(s_target)),
      "l"(g_source), "r"(bytes), "r"(shared_address(&s_barrier)), "l"(cache_policy)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_load(void* s_target, const CUtensorMap& map, int column, int row,
                                                          uint64_t& s_barrier, uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(s_target)),
      "l"(&map), "r"(shared_address(&s_barrier)), "r"(column), "r"(row), "l"(cache_policy)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_load(void* s_target, const CUtensorMap& map, int column, int row,
                                                          int layer, uint64_t& s_barrier, uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(s_target)),
      "l"(&map), "r"(shared_address(&s_barrier)), "r"(column), "r"(row), "r"(layer), "l"(cache_policy)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap& map, const void* s_source, int column,
                                                           int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared_address(s_source)), "r"(column), "r"(row)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ __forceinline__ void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}
