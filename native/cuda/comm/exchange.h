#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/comm/collectives.h"
#include "cuda/comm/peer_sum.h"
#include "cuda/kernels/norm/rows.h"
#include "cuda/comm/side_stream.h"
#include "model/backend.h"

namespace glint {

class World {
 public:
  explicit World(const glint_engine_options& options);

  cuda::RankGroup group;
};

namespace cuda {

enum class Exchange { kAlone, kPeers, kGathered, kSharded };

enum class UpdateSource : int32_t { kAttention = 0, kFeedForward = 1 };

struct PendingUpdate {
  const float* parts = nullptr;
  int64_t part_stride = 0;
  int32_t num_parts = 0;
  bool is_with_peers = false;
};

struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};

struct SharedRows {
  void* first = nullptr;
  int64_t row_bytes = 0;
  void* second = nullptr;
  int64_t second_row_bytes = 0;
};

struct ConcatColumnsCall {
  float* out;
  const float* in;
  int64_t num_parts;
  int64_t rows;
  int64_t cols;
};

Exchange choose_exchange(const Backend& backend, int64_t num_rows);
RowRange own_rows(const Backend& backend);
float* update_target(Backend& backend, UpdateSource source);
void norm_update(Backend& backend, NormCall norm);
void finish_with_peers(Backend& backend);
void share_rows(Backend& backend, const SharedRows& shared);
void share_rows_aside(Backend& backend, const SharedRows& shared, Arrival arrival);
void await_rows(Backend& backend, Arrival arrival);
void gather_logits(Backend& backend, int64_t count);
void share_results(Backend& backend, void* results, int64_t byte_count);
void wait_for_event(Backend& backend, cudaEvent_t event);
void launch_concat_columns(const ConcatColumnsCall& call, cudaStream_t stream);
void launch_repeat_rows(const SharedRows& shared, int64_t rows_per_piece, int32_t num_pieces, cudaStream_t stream);

}

}
