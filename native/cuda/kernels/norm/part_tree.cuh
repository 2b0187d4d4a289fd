#pragma once

#include <cstdint>

namespace glint::cuda {

struct StridedParts {
  const float* g_first;
  int64_t stride;

  __device__ __forceinline__ const float* operator[](int part) const { return g_first + part * stride; }
};

template <int kRoom>
__device__ __forceinline__ float join_tree(float (&r_parts)[kRoom], int num_parts) {
#pragma unroll
  for (int width = 1; width < kRoom; width *= 2) {
#pragma unroll
    for (int part = 0; part + width < kRoom; part += 2 * width) {
      const float sum = r_parts[part] + r_parts[part + width];
      r_parts[part] = kRoom <= 2 || part + width < num_parts ? sum : r_parts[part];
    }
  }
  return r_parts[0];
}

template <int kRoom, typename Parts>
__device__ __forceinline__ float joined_number(const Parts& parts, int num_parts, int64_t index) {
  float r_parts[kRoom];
#pragma unroll
  for (int part = 0; part < kRoom; ++part) r_parts[part] = parts[min(part, num_parts - 1)][index];
  return join_tree(r_parts, num_parts);
}

template <int kRoom, typename Parts>
__device__ __forceinline__ float4 joined_vector(const Parts& parts, int num_parts, int64_t index) {
  float r_parts[4][kRoom];
#pragma unroll
  for (int part = 0; part < kRoom; ++part) {
    const float4 loaded = *reinterpret_cast<const float4*>(parts[min(part, num_parts - 1)] + index);
    r_parts[0][part] = loaded.x;
    r_parts[1][part] = loaded.y;
    r_parts[2][part] = loaded.z;
    r_parts[3][part] = loaded.w;
  }
  return {join_tree(r_parts[0], num_parts), join_tree(r_parts[1], num_parts), join_tree(r_parts[2], num_parts),
          join_tree(r_parts[3], num_parts)};
}

}
