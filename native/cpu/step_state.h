#pragma once

#include "cpu/backend.h"

namespace glint {

namespace cpu {

struct Shard {
  int64_t row_first = 0;
  int64_t row_count = 0;
  int64_t rows_per_rank = 0;
  bool is_whole = true;
};

}

struct StepState {
  int64_t num_rows() const { return static_cast<int64_t>(batch.tokens.size()); }

  StepBatch batch;
  cpu::Shard shard;
  int64_t num_logit_rows = 0;
};

}
