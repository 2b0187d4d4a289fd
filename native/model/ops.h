#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "model/backend.h"
#include "model/sampling.h"

namespace glint {

struct BatchRequest {
  int32_t row_first;
  int32_t row_count;
  int32_t first_position;
  int32_t context_first = 0;
  const int32_t* pages = nullptr;
};

struct StepBatch {
  std::span<const int32_t> tokens;
  std::span<const int32_t> sampled_rows;
  std::span<const int32_t> positions;
  std::span<const BatchRequest> requests;
  std::span<const int32_t> logit_rows;
};

struct PageState {
  int32_t row;
  int32_t page;
  bool is_kept;
};

enum class Pass { kMain, kDraft };

inline constexpr int32_t kSampleSlots = GLINT_MAX_STEPS_IN_FLIGHT + 1;
inline constexpr int32_t kPromptSlot = GLINT_MAX_STEPS_IN_FLIGHT;

namespace ops {

bool keeps_sampled_tokens(const Backend& backend);
void begin_step(Backend& backend, StepState& step, const StepBatch& batch, int32_t slot);
bool replay_step(Backend& backend, StepState& step, Pass pass);
bool capture_step(Backend& backend, StepState& step, Pass pass, const std::function<void()>& run);

void rope_table(Backend& backend, StepState& step);
void embed(Backend& backend, StepState& step);
void attention_norm(Backend& backend, StepState& step, int64_t layer);
void qkv_proj(Backend& backend, StepState& step, int64_t layer);
void rope_and_cache(Backend& backend, StepState& step, int64_t layer);
void attention(Backend& backend, StepState& step, int64_t layer);
void o_proj(Backend& backend, StepState& step, int64_t layer);
void all_reduce_residual(Backend& backend, StepState& step);
void feed_forward_norm(Backend& backend, StepState& step, int64_t layer);
void dense_feed_forward(Backend& backend, StepState& step, int64_t layer);
void router(Backend& backend, StepState& step, int64_t layer);
void shared_expert(Backend& backend, StepState& step, int64_t layer);
void routed_experts(Backend& backend, StepState& step, int64_t layer);
void final_norm(Backend& backend, StepState& step, std::span<const int32_t> rows);
void lm_head(Backend& backend, StepState& step);

void mtp_hidden(Backend& backend, StepState& step, std::span<const int32_t> rows, bool is_first_draft);
void mtp_page_states(Backend& backend, std::span<const PageState> states);
void mtp_proj(Backend& backend, StepState& step);
void mtp_norm(Backend& backend, StepState& step, std::span<const int32_t> rows);
void mtp_head(Backend& backend, StepState& step);

void sample_rows(Backend& backend, int32_t slot, std::span<const SamplingRow> rows);
void collect_rows(Backend& backend, int32_t slot, std::span<SampledRow> out);

double read_bytes_per_second(Backend& backend, uint64_t byte_count);
void measure_arithmetic(Backend& backend, glint_arithmetic& arithmetic);

void read_hidden(Backend& backend, StepState& step, float* out);
void write_hidden(Backend& backend, StepState& step, const float* in);
void read_logits(Backend& backend, float* out, int64_t count);
void fill_pages(Backend& backend, std::byte value);

}

}
