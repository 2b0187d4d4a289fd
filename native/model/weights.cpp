#include "model/weights.h"

#include <cmath>
#include <cstring>
#include <unordered_map>

#include "base/contract.h"
#include "base/fp8.h"
#include "model/load_progress.h"

namespace glint {

Weight Weight::row_slice(int64_t first, int64_t count) const {
  Weight slice = *this;
  slice.data = row(first);
  slice.rows = count;
  slice.row_first = row_first + first;
  return slice;
}

Weight Weight::col_slice(int64_t first, int64_t count) const {
  Weight slice = *this;
  slice.data = data + first * element_bytes();
  slice.cols = count;
  slice.col_first = col_first + first;
  return slice;
}

namespace {

bool is_known_dtype(int32_t dtype) { return dtype >= GLINT_DTYPE_F32 && dtype <= GLINT_DTYPE_F8_E4M3; }

int64_t dtype_bytes(int32_t dtype) {
  switch (dtype) {
    case GLINT_DTYPE_F32:
      return 4;
    case GLINT_DTYPE_BF16:
      return 2;
    case GLINT_DTYPE_F8_E4M3:
      return 1;
    default:
      throw Failure(GLINT_STATUS_INVALID_ARGUMENT, text("a tensor has the unknown dtype ", dtype));
  }
}

uint64_t tensor_key(int32_t role, int32_t part, int32_t layer, int32_t expert) {
  return static_cast<uint64_t>(role) << 56U | static_cast<uint64_t>(part) << 48U |
         static_cast<uint64_t>(static_cast<uint32_t>(layer + 1) & 0xffffffU) << 24U |
         (static_cast<uint32_t>(expert + 1) & 0xffffffU);
}

int64_t tiles_over(int64_t length) { return (length + kScaleTile - 1) / kScaleTile; }

void check_tensor(const glint_tensor& tensor, int64_t index, std::span<const glint_file> files) {
  require_struct(&tensor, "tensor");
  require_argument(tensor.role >= GLINT_ROLE_EMBEDDING && tensor.role <= GLINT_ROLE_EH_PROJ, "tensor ", index,
                   " has the unknown role ", tensor.role);
  require_argument(tensor.part >= GLINT_PART_WEIGHT && tensor.part <= GLINT_PART_BIAS, "tensor ", index,
                   " has the unknown part ", tensor.part);
  require_argument(tensor.rows > 0 && tensor.cols > 0 && tensor.rows < (1LL << 31) && tensor.cols < (1LL << 31),
                   "tensor ", index, " has the shape ", tensor.rows, " x ", tensor.cols);
  require_argument(tensor.file_index >= 0 && static_cast<size_t>(tensor.file_index) < files.size(), "tensor ", index,
                   " names file ", tensor.file_index, " of ", files.size());
  require_argument(is_known_dtype(tensor.dtype), "tensor ", index, " has the unknown dtype ", tensor.dtype);
  const uint64_t expected = static_cast<uint64_t>(tensor.rows) * static_cast<uint64_t>(tensor.cols) *
                            static_cast<uint64_t>(dtype_bytes(tensor.dtype));
  require_argument(tensor.byte_count == expected, "tensor ", index, " has ", tensor.byte_count, " bytes, its shape ",
                   tensor.rows, " x ", tensor.cols, " needs ", expected);
  const uint64_t file_bytes = files[static_cast<size_t>(tensor.file_index)].byte_count;
  require_argument(tensor.byte_count <= file_bytes && tensor.file_offset <= file_bytes - tensor.byte_count, "tensor ",
                   index, " ends behind the end of file ", tensor.file_index, " (", file_bytes, " bytes)");
  require_argument(tensor.layer >= -1 && tensor.layer < (1 << 20) && tensor.expert >= -1 && tensor.expert < (1 << 20),
                   "tensor ", index, " has layer ", tensor.layer, " and expert ", tensor.expert);
}

}

bool has_fp8_nan(const std::byte* values, uint64_t count) {
  unsigned found = 0;
  for (uint64_t index = 0; index < count; ++index) {
    found |= static_cast<unsigned>((std::to_integer<uint8_t>(values[index]) & 0x7fU) == 0x7fU);
  }
  return found != 0;
}

LoadProgress& load_progress() {
  static LoadProgress progress;
  return progress;
}

class WeightStore::Table {
 public:
  Table(WeightStore& store, std::span<const glint_tensor> tensors, std::span<const glint_file> files,
        int32_t scale_kind, bool checks_fp8_values)
      : store_(store), scale_kind_(scale_kind), checks_fp8_values_(checks_fp8_values) {
    entries_.reserve(tensors.size());
    for (size_t index = 0; index < tensors.size(); ++index) {
      const glint_tensor& tensor = tensors[index];
      check_tensor(tensor, static_cast<int64_t>(index), files);
      const bool is_new =
          entries_.emplace(tensor_key(tensor.role, tensor.part, tensor.layer, tensor.expert), &tensor).second;
      require_argument(is_new, "tensor ", index, " (role ", tensor.role, ", part ", tensor.part, ", layer ",
                       tensor.layer, ", expert ", tensor.expert, ") occurs twice");
    }
  }

  size_t num_unused() const { return entries_.size() - num_used_; }

  const float* floats(int32_t role, int32_t part, int32_t layer, int64_t rows) const {
    const glint_tensor& tensor = find(role, part, layer, -1, rows, 1);
    return as_floats(tensor);
  }

  Weight weight(int32_t role, int32_t layer, int32_t expert, int64_t rows, int64_t cols, bool may_be_scaled) const {
    const glint_tensor& tensor = find(role, GLINT_PART_WEIGHT, layer, expert, rows, cols);
    const bool is_scaled = may_be_scaled && scale_kind_ != GLINT_SCALE_NONE;
    require_argument(tensor.dtype == (is_scaled ? GLINT_DTYPE_F8_E4M3 : GLINT_DTYPE_BF16), "weight of role ", role,
                     ", layer ", layer, " has dtype ", tensor.dtype, ": scaled weights are E4M3, the others BF16");
    Weight weight{.data = as_elements(tensor),
                  .scales = nullptr,
                  .rows = rows,
                  .cols = cols,
                  .stride = cols,
                  .row_first = 0,
                  .col_first = 0,
                  .scale_stride = tiles_over(cols),
                  .dtype = tensor.dtype,
                  .scale_kind = is_scaled ? scale_kind_ : GLINT_SCALE_NONE};
    if (is_scaled) {
      weight.scales = scales(role, layer, expert, rows, cols);
      require_argument(!checks_fp8_values_ || !has_fp8_nan(weight.data, tensor.byte_count), "the E4M3 weight of role ",
                       role, ", layer ", layer, ", expert ", expert,
                       " holds an FP8 NaN (0x7f or 0xff): the file is damaged");
    }
    return weight;
  }

  Weight embedding_or_shared(int32_t layer, const Weight& shared) const {
    const auto entry = entries_.find(tensor_key(GLINT_ROLE_EMBEDDING, GLINT_PART_WEIGHT, layer, -1));
    require_argument(entry == entries_.end() || entry->second->dtype == GLINT_DTYPE_BF16, "the embedding of layer ",
                     layer, " (role ", GLINT_ROLE_EMBEDDING, ") has dtype ",
                     entry == entries_.end() ? 0 : entry->second->dtype, ": embeddings are BF16 (", GLINT_DTYPE_BF16,
                     "); convert it, or leave it out to use that of the model");
    return weight_or_shared(GLINT_ROLE_EMBEDDING, layer, shared);
  }

  Weight weight_or_shared(int32_t role, int32_t layer, const Weight& shared) const {
    const auto entry = entries_.find(tensor_key(role, GLINT_PART_WEIGHT, layer, -1));
    if (entry == entries_.end()) return shared;
    const glint_tensor& tensor = *entry->second;
    const bool is_same_shape = tensor.rows == shared.rows && tensor.cols == shared.cols && tensor.dtype == shared.dtype;
    if (is_same_shape && std::memcmp(mapped(tensor), shared.data, tensor.byte_count) == 0) {
      ++num_used_;
      if (checks_fp8_values_) load_progress().bytes_done += tensor.byte_count;
      return shared;
    }
    return weight(role, layer, -1, shared.rows, shared.cols, tensor.dtype == GLINT_DTYPE_F8_E4M3);
  }

  FeedForwardWeights feed_forward(int32_t gate_role, int32_t layer, int32_t expert, int64_t width,
                                  int64_t hidden) const {
    return {.gate = weight(gate_role, layer, expert, width, hidden, true),
            .up = weight(gate_role + 1, layer, expert, width, hidden, true),
            .down = weight(gate_role + 2, layer, expert, hidden, width, true)};
  }

 private:
  const glint_tensor& find(int32_t role, int32_t part, int32_t layer, int32_t expert, int64_t rows,
                           int64_t cols) const {
    const auto entry = entries_.find(tensor_key(role, part, layer, expert));
    require_argument(entry != entries_.end(), "the tensor table lacks role ", role, ", part ", part, ", layer ", layer,
                     ", expert ", expert);
    const glint_tensor& tensor = *entry->second;
    require_argument(tensor.rows == rows && tensor.cols == cols, "tensor of role ", role, ", part ", part, ", layer ",
                     layer, ", expert ", expert, " is ", tensor.rows, " x ", tensor.cols, ", the model needs ", rows,
                     " x ", cols);
    ++num_used_;
    return tensor;
  }

  const float* scales(int32_t role, int32_t layer, int32_t expert, int64_t rows, int64_t cols) const {
    const int64_t scale_rows = scale_kind_ == GLINT_SCALE_CHANNEL  ? rows
                               : scale_kind_ == GLINT_SCALE_TENSOR ? 1
                                                                   : tiles_over(rows);
    const int64_t scale_cols = scale_kind_ == GLINT_SCALE_TILE ? tiles_over(cols) : 1;
    const float* values = as_floats(find(role, GLINT_PART_SCALE, layer, expert, scale_rows, scale_cols));
    for (int64_t index = 0; index < scale_rows * scale_cols; ++index) {
      require_argument(std::isfinite(values[index]), "a weight scale of role ", role, ", layer ", layer, ", expert ",
                       expert, " is not finite (entry ", index, ")");
    }
    return values;
  }

  const std::byte* mapped(const glint_tensor& tensor) const {
    return store_.files_[static_cast<size_t>(tensor.file_index)].data() + tensor.file_offset;
  }

  const std::byte* as_elements(const glint_tensor& tensor) const {
    const std::byte* source = mapped(tensor);
    store_.bytes_mapped_ += tensor.byte_count;
    if (checks_fp8_values_) load_progress().bytes_done += tensor.byte_count;
    const auto alignment = static_cast<uintptr_t>(dtype_bytes(tensor.dtype));
    if (reinterpret_cast<uintptr_t>(source) % alignment == 0) return source;
    ZeroedMemory& copy = store_.copies_.emplace_back(tensor.byte_count);
    std::memcpy(copy.data(), source, tensor.byte_count);
    store_.bytes_copied_ += tensor.byte_count;
    return copy.data();
  }

  const float* as_floats(const glint_tensor& tensor) const {
    require_argument(tensor.dtype != GLINT_DTYPE_F8_E4M3, "a vector of role ", tensor.role, ", layer ", tensor.layer,
                     " is E4M3, expected BF16 or F32");
    if (tensor.dtype == GLINT_DTYPE_F32) return reinterpret_cast<const float*>(as_elements(tensor));
    store_.bytes_mapped_ += tensor.byte_count;
    store_.bytes_copied_ += tensor.byte_count;
    const auto count = static_cast<size_t>(tensor.rows * tensor.cols);
    auto* values = reinterpret_cast<float*>(store_.copies_.emplace_back(count * sizeof(float)).data());
    const std::byte* source = mapped(tensor);
    for (size_t index = 0; index < count; ++index) {
      uint16_t bits = 0;
      std::memcpy(&bits, source + index * sizeof(bits), sizeof(bits));
      values[index] = float_from_bf16(bits);
    }
    return values;
  }

  WeightStore& store_;
  int32_t scale_kind_;
  bool checks_fp8_values_;
  std::unordered_map<uint64_t, const glint_tensor*> entries_;
  mutable size_t num_used_ = 0;
};

void WeightStore::place_layer(const Table& table, const glint_model& model, int32_t layer) {
  LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  const int64_t hidden = model.hidden_size;
  const int64_t query_width = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv_width = int64_t{model.num_kv_heads} * model.head_dim;
  weights.input_norm = table.floats(GLINT_ROLE_INPUT_NORM, GLINT_PART_WEIGHT, layer, hidden);
  weights.post_attention_norm = table.floats(GLINT_ROLE_POST_ATTENTION_NORM, GLINT_PART_WEIGHT, layer, hidden);
  weights.query = table.weight(GLINT_ROLE_QUERY, layer, -1, query_width, hidden, true);
  weights.key = table.weight(GLINT_ROLE_KEY, layer, -1, kv_width, hidden, true);
  weights.value = table.weight(GLINT_ROLE_VALUE, layer, -1, kv_width, hidden, true);
  weights.output = table.weight(GLINT_ROLE_OUTPUT, layer, -1, hidden, query_width, true);
  if (model.has_attention_bias != 0) {
    weights.query_bias = table.floats(GLINT_ROLE_QUERY, GLINT_PART_BIAS, layer, query_width);
    weights.key_bias = table.floats(GLINT_ROLE_KEY, GLINT_PART_BIAS, layer, kv_width);
    weights.value_bias = table.floats(GLINT_ROLE_VALUE, GLINT_PART_BIAS, layer, kv_width);
  }
  if (model.has_qk_norm != 0) {
    weights.query_norm = table.floats(GLINT_ROLE_QUERY_NORM, GLINT_PART_WEIGHT, layer, model.head_dim);
    weights.key_norm = table.floats(GLINT_ROLE_KEY_NORM, GLINT_PART_WEIGHT, layer, model.head_dim);
  }
  if (layer < model.num_dense_layers) {
    weights.dense = table.feed_forward(GLINT_ROLE_GATE, layer, -1, model.dense_width, hidden);
    return;
  }
  weights.router = table.weight(GLINT_ROLE_ROUTER, layer, -1, model.num_experts, hidden, false);
  weights.router_bias = table.floats(GLINT_ROLE_ROUTER, GLINT_PART_BIAS, layer, model.num_experts);
  weights.shared = table.feed_forward(GLINT_ROLE_SHARED_GATE, layer, -1, model.shared_width, hidden);
  for (int32_t expert = 0; expert < model.num_experts; ++expert) {
    weights.experts.push_back(table.feed_forward(GLINT_ROLE_GATE, layer, expert, model.expert_width, hidden));
  }
}

void WeightStore::place_mtp(const Table& table, const glint_model& model) {
  const int32_t layer = model.num_layers;
  const int32_t hidden = model.hidden_size;
  const auto norm = [&](int32_t role) { return table.floats(role, GLINT_PART_WEIGHT, layer, hidden); };
  place_layer(table, model, layer);
  weights_.mtp = {.embedding_norm = norm(GLINT_ROLE_EMBEDDING_NORM),
                  .hidden_norm = norm(GLINT_ROLE_HIDDEN_NORM),
                  .head_norm = norm(GLINT_ROLE_FINAL_NORM),
                  .eh_proj = table.weight(GLINT_ROLE_EH_PROJ, layer, -1, hidden, int64_t{2} * hidden, false),
                  .embedding = table.embedding_or_shared(layer, weights_.embedding),
                  .head = table.weight_or_shared(GLINT_ROLE_LM_HEAD, layer, weights_.lm_head)};
}

WeightStore::WeightStore(const glint_model& model, std::span<const glint_file> files,
                         std::span<const glint_tensor> tensors, bool has_mtp, bool checks_fp8_values) {
  if (tensors.empty()) return;
  uint64_t total = 0;
  for (const glint_tensor& tensor : tensors) total += tensor.byte_count;
  load_progress().begin(total);
  files_.reserve(files.size());
  for (const glint_file& file : files) {
    require_struct(&file, "file");
    files_.emplace_back(file.path, file.byte_count);
  }
  const Table table(*this, tensors, files, model.weight_scale_kind, checks_fp8_values);
  weights_.embedding = table.weight(GLINT_ROLE_EMBEDDING, -1, -1, model.vocab_size, model.hidden_size, false);
  weights_.lm_head = table.weight(GLINT_ROLE_LM_HEAD, -1, -1, model.vocab_size, model.hidden_size, false);
  weights_.final_norm = table.floats(GLINT_ROLE_FINAL_NORM, GLINT_PART_WEIGHT, -1, model.hidden_size);
  weights_.layers.resize(static_cast<size_t>(model.num_layers) + (has_mtp ? 1 : 0));
  for (int32_t layer = 0; layer < model.num_layers; ++layer) place_layer(table, model, layer);
  if (has_mtp) place_mtp(table, model);
  if (weights_.lm_head.data == weights_.embedding.data) {
    bytes_mapped_ -= static_cast<uint64_t>(model.vocab_size) * static_cast<uint64_t>(model.hidden_size) * 2;
  }
  require_argument(table.num_unused() == 0, table.num_unused(), " tensors of the table have no place in the model");
}

void check_model(const glint_model& model) {
  const auto positive = [](int32_t value, int32_t limit, const char* name) {
    require_argument(value > 0 && value <= limit, "model.", name, " is ", value, ", expected 1 to ", limit);
  };
  const auto bounded = [](int32_t value, int32_t limit, const char* name) {
    require_argument(value >= 0 && value <= limit, "model.", name, " is ", value, ", expected 0 to ", limit);
  };
  bounded(model.dense_width, 1 << 20, "dense_width");
  bounded(model.expert_width, 1 << 20, "expert_width");
  bounded(model.shared_width, 1 << 20, "shared_width");
  bounded(model.num_experts, 1 << 12, "num_experts");
  bounded(model.experts_per_token, 1 << 12, "experts_per_token");
  positive(model.vocab_size, 1 << 22, "vocab_size");
  positive(model.mtp_vocab_size, model.vocab_size, "mtp_vocab_size");
  positive(model.hidden_size, 1 << 17, "hidden_size");
  positive(model.num_layers, 1 << 12, "num_layers");
  positive(model.num_heads, 1 << 10, "num_heads");
  positive(model.num_kv_heads, model.num_heads, "num_kv_heads");
  positive(model.head_dim, 1 << 10, "head_dim");
  positive(model.rotary_dim, model.head_dim, "rotary_dim");
  positive(model.max_positions, 1 << 24, "max_positions");
  require_argument(model.rotary_dim % 2 == 0, "model.rotary_dim is ", model.rotary_dim, ", expected an even number");
  require_argument(model.num_heads % model.num_kv_heads == 0, "model.num_heads ", model.num_heads,
                   " is not a multiple of num_kv_heads ", model.num_kv_heads);
  require_argument(model.num_dense_layers >= 0 && model.num_dense_layers <= model.num_layers,
                   "model.num_dense_layers is ", model.num_dense_layers);
  if (model.num_dense_layers > 0) positive(model.dense_width, 1 << 20, "dense_width");
  if (model.num_dense_layers < model.num_layers) {
    positive(model.expert_width, 1 << 20, "expert_width");
    positive(model.shared_width, 1 << 20, "shared_width");
    positive(model.num_experts, 1 << 12, "num_experts");
    positive(model.experts_per_token, model.num_experts, "experts_per_token");
  }
  require_argument(model.weight_scale_kind >= GLINT_SCALE_NONE && model.weight_scale_kind <= GLINT_SCALE_TILE,
                   "model.weight_scale_kind is ", model.weight_scale_kind);
  require_argument(model.input_group_size == 0 ||
                       (model.input_group_size == kScaleTile && model.weight_scale_kind == GLINT_SCALE_TILE),
                   "model.input_group_size is ", model.input_group_size, " and model.weight_scale_kind ",
                   model.weight_scale_kind, ": it is 0, or ", kScaleTile, " with weight_scale_kind ", GLINT_SCALE_TILE);
  const auto flag = [](int32_t value, const char* name) {
    require_argument(value == 0 || value == 1, "model.", name, " is ", value, ", expected 0 or 1");
  };
  flag(model.has_qk_norm, "has_qk_norm");
  flag(model.has_attention_bias, "has_attention_bias");
  flag(model.normalise_weights, "normalise_weights");
  require_argument(std::isfinite(model.routed_scaling), "model.routed_scaling is not finite");
  require_argument(std::isfinite(model.norm_epsilon) && model.norm_epsilon > 0, "model.norm_epsilon is ",
                   model.norm_epsilon);
  require_argument(std::isfinite(model.rope_theta) && model.rope_theta > 1, "model.rope_theta is ", model.rope_theta);
}

}
