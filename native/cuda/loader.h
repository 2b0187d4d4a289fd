#pragma once

#include <cstdint>

#include "cuda/placement.h"
#include "model/weights.h"

namespace glint::cuda {

uint64_t loader_pinned_bytes();
uint64_t loader_device_bytes(const glint_model& model);
void load_weights(const PlacedWeights& placed, const glint_model& model, const ModelWeights& source);
void fill_synthetic_weights(const PlacedWeights& placed, const glint_model& model, uint64_t seed);

}
