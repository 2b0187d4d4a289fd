#pragma once

#include "cpu/backend.h"

namespace glint::cpu {

Shard choose_shard(const Backend& backend, int64_t count);
void norm_hidden(Backend& backend, const float* weight);
void share_hidden(Backend& backend);
void project_logits(Backend& backend, const ProductInput& input, int64_t count);

}
