#pragma once

#include "base/fp8.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/bench/step_check.h"

namespace glint::cuda::bench {

struct Heads {
  int32_t num_heads = 12;
  int32_t num_kv_heads = 1;
  int32_t head_dim = 128;

  int32_t group_heads() const { return num_heads / num_kv_heads; }
  int32_t padded_dim() const { return static_cast<int32_t>(padded_head_dim(head_dim)); }
  int64_t slab_bytes() const { return int64_t{kPageTokens} * padded_dim() * 2; }
  int64_t page_bytes() const { return num_kv_heads * slab_bytes(); }
};

using Lengths = std::vector<std::pair<int32_t, int32_t>>;

struct PagedRequest {
  int32_t row_first;
  int32_t row_count;
  int32_t first_position;
  int32_t page_first;

  int32_t num_positions() const { return first_position + row_count; }
};

class PagedBatch {
 public:
  PagedBatch(const Heads& heads_given, const Lengths& lengths, uint64_t seed, bool fills_all = false);

  AttendCall attend(float* out) const {
    return {.out = out,
            .query = device_query->data(),
            .pages = pool(),
            .page_table = device_table->data(),
            .num_heads = heads.num_heads,
            .num_kv_heads = heads.num_kv_heads,
            .head_dim = heads.head_dim};
  }
  KvPages pool() const {
    return {reinterpret_cast<std::byte*>(device_keys->data()), reinterpret_cast<std::byte*>(device_values->data()),
            heads.page_bytes(), heads.slab_bytes()};
  }
  float key(int32_t request, int64_t position, int kv_head, int dim) const {
    return stored(keys, request, position, kv_head, dim);
  }
  float value(int32_t request, int64_t position, int kv_head, int dim) const {
    return stored(values, request, position, kv_head, dim);
  }
  float query_value(int32_t row, int32_t head, int dim) const {
    const int64_t first = (int64_t{row} * heads.num_heads + head) * heads.padded_dim();
    return float_from_bf16(query[static_cast<size_t>(first + dim)]);
  }
  std::vector<DecodeTask> decode_tasks(const std::vector<int32_t>& rows) const;
  std::vector<PrefillTask> prefill_tasks() const;
  int32_t request_of(int32_t row) const;
  void spoil(int32_t request, int32_t first_position, int32_t last_position, bool spoils_values);
  void upload_pages();
  size_t out_floats() const {
    return static_cast<size_t>(num_rows) * static_cast<size_t>(heads.num_heads * heads.head_dim);
  }

  Heads heads;
  std::vector<PagedRequest> requests;
  int32_t num_rows = 0;
  std::vector<int32_t> table;
  std::vector<uint16_t> keys;
  std::vector<uint16_t> values;
  std::vector<uint16_t> query;
  std::unique_ptr<DeviceArray<int32_t>> device_table;
  std::unique_ptr<DeviceArray<uint16_t>> device_keys;
  std::unique_ptr<DeviceArray<uint16_t>> device_values;
  std::unique_ptr<DeviceArray<uint16_t>> device_query;

 private:
  void fill_positions(RandomSource& random);
  void fill_all(RandomSource& random);
  size_t element(int32_t request, int64_t position, int kv_head, int dim) const;
  float stored(const std::vector<uint16_t>& slabs, int32_t request, int64_t position, int kv_head, int dim) const {
    return float_from_bf16(slabs[element(request, position, kv_head, dim)]);
  }
};

class DecodeRun {
 public:
  DecodeRun(const PagedBatch& batch, const std::vector<int32_t>& rows);
  DecodeCall call(float* out) const;

 private:
  const PagedBatch& batch_;
  std::vector<DecodeTask> tasks_;
  DeviceArray<DecodeTask> device_tasks_;
  DeviceArray<int32_t> num_tasks_;
  DeviceArray<float> partials_;
  DeviceArray<int32_t> arrivals_;
};

class PrefillRun {
 public:
  explicit PrefillRun(const PagedBatch& batch);
  PrefillCall call(float* out) const;

 private:
  const PagedBatch& batch_;
  std::vector<PrefillTask> tasks_;
  DeviceArray<PrefillTask> device_tasks_;
  DeviceArray<int32_t> num_tasks_;
};

std::vector<int32_t> all_rows(const PagedBatch& batch);
std::vector<double> wanted_row(const PagedBatch& batch, int32_t row, bool covers_exponent);
double worst_error(const PagedBatch& batch, const std::vector<float>& out, const std::vector<int32_t>& rows,
                   bool covers_exponent);
void check_attention_shapes(Report& report);

}
