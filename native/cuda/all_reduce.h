#pragma once

#include "cuda/comm/columns.h"
#include "cuda/kernels/norm/rows.h"
#include "cuda/step_state.h"

namespace glint::cuda {

struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};

AllReduce choose_all_reduce(const Backend& backend, int64_t num_rows);
RowRange own_rows(const Backend& backend, const StepState& step);
float* branch_output(Backend& backend, StepState& step, Branch branch);
void norm_residual(Backend& backend, StepState& step, NormCall norm);
void finish_peer_sum(Backend& backend, StepState& step);
void all_gather_rows(Backend& backend, const StepState& step, const GatheredRows& rows);
void async_all_gather_rows(Backend& backend, const StepState& step, const GatheredRows& rows, AsyncGather gather);
void await_rows(Backend& backend, const StepState& step, AsyncGather gather);
void gather_logits(Backend& backend, int64_t count);

}
