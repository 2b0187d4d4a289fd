#pragma once

#include <cstdint>

#include "cuda/weights/placement.h"
#include "model/slices.h"

namespace glint::cuda {

uint64_t loader_pinned_bytes(int32_t num_ranks);
void load_weights(const PlacedWeights& placed, const RankSlice& slice, const ModelWeights& source);
void fill_synthetic_weights(const PlacedWeights& placed, const glint_model& model, uint64_t seed);

}
