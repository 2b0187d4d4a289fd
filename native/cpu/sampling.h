#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/sampling.h"

namespace glint::cpu {

class SamplerScratch {
 public:
  struct Buffers;

  explicit SamplerScratch(int32_t vocab_size);
  SamplerScratch(SamplerScratch&& other) noexcept;
  SamplerScratch& operator=(SamplerScratch&& other) noexcept;
  ~SamplerScratch();

  static uint64_t bytes_for(int32_t vocab_size);
  Buffers& buffers() { return *buffers_; }
  std::vector<int32_t> kept_tokens() const;

 private:
  std::unique_ptr<Buffers> buffers_;
};

void sample_row(SampledRow& out, std::span<float> logits, const SamplingRow& row, SamplerScratch& scratch);
void logprobs_row(SampledRow& out, std::span<const float> logits, int32_t actual_token, int32_t num_top);

}
