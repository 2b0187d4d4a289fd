#pragma once

#include <cstdint>
#include <vector>

#include "cuda/memory/device_memory.h"
#include "cuda/kernels/gemm/gemm.h"
#include "include/glint.h"

namespace glint::cuda {

struct PlacedWeight {
  uint8_t* packed = nullptr;
  float* scales = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t num_matrices = 1;
  int64_t matrix_bytes = 0;
  int64_t matrix_scales = 0;
  int64_t scale_stride = 0;
  int32_t scale_kind = GLINT_SCALE_NONE;
  GemmElement element = GemmElement::kE4m3;
  bool is_tiled = false;
};

struct PlacedSection {
  PlacedWeight weight;
  float* bias = nullptr;
  int64_t out_first = 0;
};

struct PlacedFeedForward {
  std::vector<PlacedSection> gate_up;
  PlacedWeight down;
  int64_t width = 0;
};

struct PlacedExperts {
  bool is_tiled = false;
  bool holds_shared = false;
  int64_t num_experts = 0;
  uint8_t* packed_gate_up = nullptr;
  uint8_t* packed_down = nullptr;
  float* gate_scales = nullptr;
  float* up_scales = nullptr;
  float* down_scales = nullptr;
  PlacedWeight gate;
  PlacedWeight up;
  PlacedWeight down;
};

struct PlacedLayer {
  float* input_norm = nullptr;
  float* post_attention_norm = nullptr;
  float* query_norm = nullptr;
  float* key_norm = nullptr;
  std::vector<PlacedSection> qkv;
  PlacedWeight output;
  PlacedFeedForward dense;
  PlacedFeedForward shared;
  uint16_t* router = nullptr;
  float* router_bias = nullptr;
  PlacedExperts experts;
};

struct PlacedMtp {
  float* embedding_norm = nullptr;
  float* hidden_norm = nullptr;
  float* head_norm = nullptr;
  PlacedWeight eh_proj;
  uint16_t* embedding = nullptr;
  PlacedWeight head;
};

struct PlacedWeights {
  uint16_t* embedding = nullptr;
  PlacedWeight lm_head;
  float* final_norm = nullptr;
  std::vector<PlacedLayer> layers;
  PlacedMtp mtp;
};

struct MtpPlacement {
  bool is_placed = false;
  bool has_own_embedding = false;
  bool has_own_head = false;
  GemmElement head_element = GemmElement::kBf16;
};

struct PlacementOptions {
  bool shares_device = false;
  int32_t num_local_experts = 0;
  int32_t vocab_rows = 0;
  int32_t num_multiprocessors = 0;
  MtpPlacement mtp;
};

constexpr int64_t element_bytes(GemmElement element) { return element == GemmElement::kBf16 ? 2 : 1; }

PlacedWeights place_weights(const glint_model& model, const PlacementOptions& options, Arena& arena);

}
