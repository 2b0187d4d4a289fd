#include "cuda/weights/load_tasks.h"

#include <algorithm>
#include <utility>

#include "base/contract.h"
#include "cuda/kernels/moe/experts.h"
#include "cuda/kernels/gemm/gemm_portable.h"

namespace glint::cuda {

namespace {

using Chain = std::vector<SourcePiece>;

int64_t tiles_over(int64_t length) { return (length + kScaleTile - 1) / kScaleTile; }

uint64_t chain_bytes(const Chain& chain) {
  uint64_t bytes = 0;
  for (const SourcePiece& piece : chain) bytes += piece.byte_count;
  return bytes;
}

uint64_t offset_in(const SourcePiece& piece, uint64_t first, uint64_t count) {
  if (piece.is_contiguous()) return first;
  require(first % piece.row_bytes == 0 && count % piece.row_bytes == 0, GLINT_STATUS_INTERNAL, "bytes ", first, " and ",
          count, " more of role ", piece.name.role, ", layer ", piece.name.layer, " are not whole rows of ",
          piece.row_bytes, " bytes");
  return first / piece.row_bytes * piece.row_stride;
}

SourcePiece slice(const SourcePiece& piece, uint64_t first, uint64_t count) {
  SourcePiece part = piece;
  if (piece.data != nullptr && !piece.repeats_one_value) part.data = piece.data + offset_in(piece, first, count);
  part.first_byte = piece.first_byte + first;
  part.byte_count = count;
  return part;
}

void append_slice(Chain& target, const Chain& chain, uint64_t first, uint64_t count) {
  uint64_t piece_first = 0;
  for (const SourcePiece& piece : chain) {
    const uint64_t piece_last = piece_first + piece.byte_count;
    const uint64_t low = std::max(first, piece_first);
    const uint64_t high = std::min(first + count, piece_last);
    if (low < high) target.push_back(slice(piece, low - piece_first, high - low));
    piece_first = piece_last;
  }
}

SourcePiece weight_piece(const Weight& weight, const TensorName& name) {
  SourcePiece piece;
  piece.name = name;
  piece.data = weight.data;
  piece.byte_count = static_cast<uint64_t>(weight.rows * weight.cols * weight.element_bytes());
  piece.row_bytes = static_cast<uint64_t>(weight.cols * weight.element_bytes());
  piece.row_stride = static_cast<uint64_t>(weight.stride * weight.element_bytes());
  piece.cols = weight.cols;
  piece.dtype = weight.dtype;
  return piece;
}

SourcePiece float_piece(const float* values, int64_t count, const TensorName& name) {
  SourcePiece piece;
  piece.name = name;
  piece.data = reinterpret_cast<const std::byte*>(values);
  piece.byte_count = static_cast<uint64_t>(count) * sizeof(float);
  return piece;
}

int64_t first_scale(const Weight& weight) {
  if (weight.scale_kind == GLINT_SCALE_CHANNEL) return weight.row_first;
  if (weight.scale_kind != GLINT_SCALE_TILE) return 0;
  return weight.row_first / kScaleTile * weight.scale_stride + weight.col_first / kScaleTile;
}

SourcePiece scale_piece(const Weight& weight, const TensorName& name) {
  const bool has_tiles = weight.scale_kind == GLINT_SCALE_TILE;
  const int64_t count = has_tiles ? tiles_over(weight.rows) * tiles_over(weight.cols) : weight.rows;
  const float* scales = weight.scales == nullptr ? nullptr : weight.scales + first_scale(weight);
  SourcePiece piece = float_piece(scales, count, {name.role, GLINT_PART_SCALE, name.layer, name.expert});
  if (has_tiles) {
    piece.row_bytes = static_cast<uint64_t>(tiles_over(weight.cols)) * sizeof(float);
    piece.row_stride = static_cast<uint64_t>(weight.scale_stride) * sizeof(float);
  }
  piece.cols = weight.cols;
  piece.repeats_one_value = weight.scale_kind == GLINT_SCALE_TENSOR;
  return piece;
}

struct NamedWeight {
  const Weight* weight;
  TensorName name;
};

class TaskPlanner {
 public:
  TaskPlanner(const glint_model& model, int32_t expert_first, std::vector<LoadTask>& tasks)
      : model_(model), expert_first_(expert_first), tasks_(tasks) {}

  void add_ends(const PlacedWeights& placed, const ModelWeights& source) {
    copy(placed.embedding, {weight_piece(source.embedding, weight_name(GLINT_ROLE_EMBEDDING))});
    add_weight(placed.lm_head, 0, {{&source.lm_head, weight_name(GLINT_ROLE_LM_HEAD)}});
    copy_floats(placed.final_norm, source.final_norm, model_.hidden_size, weight_name(GLINT_ROLE_FINAL_NORM));
  }

  void add_layer(const PlacedLayer& placed, const LayerWeights& source, int32_t layer) {
    layer_ = layer;
    copy_floats(placed.input_norm, source.input_norm, model_.hidden_size, weight_name(GLINT_ROLE_INPUT_NORM));
    copy_floats(placed.post_attention_norm, source.post_attention_norm, model_.hidden_size,
                weight_name(GLINT_ROLE_POST_ATTENTION_NORM));
    if (placed.query_norm != nullptr) {
      copy_floats(placed.query_norm, source.query_norm, model_.head_dim, weight_name(GLINT_ROLE_QUERY_NORM));
      copy_floats(placed.key_norm, source.key_norm, model_.head_dim, weight_name(GLINT_ROLE_KEY_NORM));
    }
    add_sections(placed.qkv, {{&source.query, weight_name(GLINT_ROLE_QUERY)},
                              {&source.key, weight_name(GLINT_ROLE_KEY)},
                              {&source.value, weight_name(GLINT_ROLE_VALUE)}});
    if (model_.has_attention_bias != 0) add_biases(placed.qkv, source);
    add_weight(placed.output, 0, {{&source.output, weight_name(GLINT_ROLE_OUTPUT)}});
    if (layer < model_.num_dense_layers) {
      add_feed_forward(placed.dense, source.dense, GLINT_ROLE_GATE);
      return;
    }
    copy(placed.router, {weight_piece(source.router, weight_name(GLINT_ROLE_ROUTER))});
    copy_floats(placed.router_bias, source.router_bias, model_.num_experts,
                {GLINT_ROLE_ROUTER, GLINT_PART_BIAS, layer, -1});
    if (placed.experts.is_tiled) {
      add_hopper_experts(placed.experts, source);
    } else {
      add_portable_experts(placed.experts, source);
    }
    if (!placed.experts.holds_shared) add_feed_forward(placed.shared, source.shared, GLINT_ROLE_SHARED_GATE);
  }

  void add_mtp(const PlacedWeights& placed, const MtpWeights& source) {
    const PlacedMtp& mtp = placed.mtp;
    const int64_t hidden = model_.hidden_size;
    layer_ = model_.num_layers;
    copy_floats(mtp.embedding_norm, source.embedding_norm, hidden, weight_name(GLINT_ROLE_EMBEDDING_NORM));
    copy_floats(mtp.hidden_norm, source.hidden_norm, hidden, weight_name(GLINT_ROLE_HIDDEN_NORM));
    copy_floats(mtp.head_norm, source.head_norm, hidden, weight_name(GLINT_ROLE_FINAL_NORM));
    add_weight(mtp.eh_proj, 0, {{&source.eh_proj, weight_name(GLINT_ROLE_EH_PROJ)}});
    if (mtp.embedding != placed.embedding) {
      copy(mtp.embedding, {weight_piece(source.embedding, weight_name(GLINT_ROLE_EMBEDDING))});
    }
    if (mtp.head.packed == placed.lm_head.packed) return;
    require(source.head.scale_kind != GLINT_SCALE_TILE || source.head.row_first % kScaleTile == 0,
            GLINT_STATUS_UNSUPPORTED, "a rank's part of the MTP layer's head begins at row ", source.head.row_first,
            ", and its scales are for tiles of ", kScaleTile, ": use another number of ranks, or no drafts");
    add_weight(mtp.head, 0, {{&source.head, weight_name(GLINT_ROLE_LM_HEAD)}});
  }

 private:
  TensorName weight_name(int32_t role, int32_t expert = -1) const { return {role, GLINT_PART_WEIGHT, layer_, expert}; }

  void add_task(TaskKind kind, uint8_t* target, const PlacedWeight& shape, int64_t rows, Chain pieces) {
    LoadTask task;
    task.kind = kind;
    task.target = target;
    task.rows = rows;
    task.cols = shape.cols;
    task.element = shape.element;
    task.byte_count = chain_bytes(pieces);
    task.pieces = std::move(pieces);
    tasks_.push_back(std::move(task));
  }

  template <typename T>
  void copy(T* target, const Chain& chain) {
    const uint64_t total = chain_bytes(chain);
    for (uint64_t first = 0; first < total; first += kStageBytes) {
      Chain pieces;
      append_slice(pieces, chain, first, std::min(kStageBytes, total - first));
      add_task(TaskKind::kCopy, reinterpret_cast<uint8_t*>(target) + first, {}, 0, std::move(pieces));
    }
  }

  void copy_floats(float* target, const float* values, int64_t count, const TensorName& name) {
    copy(target, {float_piece(values, count, name)});
  }

  static int64_t task_rows(int64_t row_bytes, int64_t unit_rows, const TensorName& name) {
    const int64_t rows = static_cast<int64_t>(kStageBytes) / row_bytes / unit_rows * unit_rows;
    require_argument(rows > 0, "the weight of role ", name.role, ", layer ", name.layer, " has rows of ", row_bytes,
                     " bytes; ", unit_rows, " of them must fit in the ", kStageBytes, " bytes of a staging buffer");
    return rows;
  }

  void add_weight(const PlacedWeight& placed, int64_t matrix, const std::vector<NamedWeight>& stacked) {
    Chain chain;
    Chain scales;
    for (const NamedWeight& source : stacked) {
      chain.push_back(weight_piece(*source.weight, source.name));
      if (placed.scales != nullptr) scales.push_back(scale_piece(*source.weight, source.name));
    }
    const int64_t row_bytes = placed.cols * element_bytes(placed.element);
    const auto whole_bytes = static_cast<uint64_t>(placed.rows * row_bytes);
    require(chain_bytes(chain) == whole_bytes, GLINT_STATUS_INTERNAL, "the weight of role ", stacked.front().name.role,
            ", layer ", layer_, " has ", chain_bytes(chain), " bytes and a place for ", whole_bytes);
    const int64_t most =
        task_rows(row_bytes, placed.is_tiled ? kGemmTileRows : kPortableUnitRows, stacked.front().name);
    uint8_t* target = placed.packed + matrix * placed.matrix_bytes;
    for (int64_t first = 0; first < placed.rows; first += most) {
      const int64_t rows = std::min(most, placed.rows - first);
      Chain pieces;
      append_slice(pieces, chain, static_cast<uint64_t>(first * row_bytes), static_cast<uint64_t>(rows * row_bytes));
      const int64_t offset = placed.is_tiled ? packed_weight_bytes(first, row_bytes)
                                             : portable_weight_bytes(first, placed.cols, placed.element);
      add_task(placed.is_tiled ? TaskKind::kPackRows : TaskKind::kPackPortable, target + offset, placed, rows,
               std::move(pieces));
    }
    if (!scales.empty()) copy(placed.scales + matrix * placed.matrix_scales, scales);
  }

  void add_sections(const std::vector<PlacedSection>& sections, const std::vector<NamedWeight>& sources) {
    if (sections.size() == 1) {
      add_weight(sections.front().weight, 0, sources);
      return;
    }
    for (size_t index = 0; index < sections.size(); ++index) add_weight(sections[index].weight, 0, {sources[index]});
  }

  void add_biases(const std::vector<PlacedSection>& sections, const LayerWeights& source) {
    const Chain biases = {
        float_piece(source.query_bias, source.query.rows, {GLINT_ROLE_QUERY, GLINT_PART_BIAS, layer_, -1}),
        float_piece(source.key_bias, source.key.rows, {GLINT_ROLE_KEY, GLINT_PART_BIAS, layer_, -1}),
        float_piece(source.value_bias, source.value.rows, {GLINT_ROLE_VALUE, GLINT_PART_BIAS, layer_, -1})};
    for (const PlacedSection& section : sections) {
      Chain pieces;
      append_slice(pieces, biases, static_cast<uint64_t>(section.out_first) * sizeof(float),
                   static_cast<uint64_t>(section.weight.rows) * sizeof(float));
      copy(section.bias, pieces);
    }
  }

  void add_feed_forward(const PlacedFeedForward& placed, const FeedForwardWeights& source, int32_t gate_role) {
    add_sections(placed.gate_up, {{&source.gate, weight_name(gate_role)}, {&source.up, weight_name(gate_role + 1)}});
    add_weight(placed.down, 0, {{&source.down, weight_name(gate_role + 2)}});
  }

  void add_portable_experts(const PlacedExperts& placed, const LayerWeights& source) {
    for (int32_t expert = 0; expert < static_cast<int32_t>(placed.num_experts); ++expert) {
      const FeedForwardWeights& weights = source.experts[static_cast<size_t>(expert)];
      const int32_t named = expert_first_ + expert;
      add_weight(placed.gate, expert, {{&weights.gate, weight_name(GLINT_ROLE_GATE, named)}});
      add_weight(placed.up, expert, {{&weights.up, weight_name(GLINT_ROLE_UP, named)}});
      add_weight(placed.down, expert, {{&weights.down, weight_name(GLINT_ROLE_DOWN, named)}});
    }
  }

  void add_hopper_experts(const PlacedExperts& placed, const LayerWeights& source) {
    Chain gate_scales;
    Chain up_scales;
    Chain down_scales;
    const auto num_experts = static_cast<int32_t>(placed.num_experts);
    for (int32_t matrix = 0; matrix < num_experts + (placed.holds_shared ? 1 : 0); ++matrix) {
      const bool is_shared = matrix == num_experts;
      const FeedForwardWeights& weights = is_shared ? source.shared : source.experts[static_cast<size_t>(matrix)];
      const int32_t gate_role = is_shared ? GLINT_ROLE_SHARED_GATE : GLINT_ROLE_GATE;
      const int32_t expert = is_shared ? -1 : expert_first_ + matrix;
      const NamedWeight gate = {&weights.gate, weight_name(gate_role, expert)};
      const NamedWeight up = {&weights.up, weight_name(gate_role + 1, expert)};
      const NamedWeight down = {&weights.down, weight_name(gate_role + 2, expert)};
      add_gate_up(placed, matrix, gate, up);
      add_down(placed, matrix, down);
      gate_scales.push_back(scale_piece(*gate.weight, gate.name));
      up_scales.push_back(scale_piece(*up.weight, up.name));
      down_scales.push_back(scale_piece(*down.weight, down.name));
    }
    copy(placed.gate_scales, gate_scales);
    copy(placed.up_scales, up_scales);
    copy(placed.down_scales, down_scales);
  }

  void add_gate_up(const PlacedExperts& placed, int64_t matrix, const NamedWeight& gate, const NamedWeight& up) {
    const int64_t width = gate.weight->rows;
    const int64_t row_bytes = gate.weight->cols;
    const int64_t most = task_rows(2 * row_bytes, kGemmTileRows / 2, gate.name);
    uint8_t* target = placed.packed_gate_up + matrix * packed_gate_up_bytes(width, row_bytes);
    PlacedWeight shape;
    shape.cols = row_bytes;
    for (int64_t first = 0; first < width; first += most) {
      const int64_t rows = std::min(most, width - first);
      const auto first_byte = static_cast<uint64_t>(first * row_bytes);
      const auto byte_count = static_cast<uint64_t>(rows * row_bytes);
      Chain pieces = {slice(weight_piece(*gate.weight, gate.name), first_byte, byte_count),
                      slice(weight_piece(*up.weight, up.name), first_byte, byte_count)};
      add_task(TaskKind::kPackGateUp, target + packed_gate_up_bytes(first, row_bytes), shape, rows, std::move(pieces));
    }
  }

  void add_down(const PlacedExperts& placed, int64_t matrix, const NamedWeight& down) {
    const int64_t row_bytes = down.weight->cols;
    const int64_t most = task_rows(row_bytes, plan_down_tile(row_bytes).rows, down.name);
    uint8_t* target = placed.packed_down + matrix * packed_down_bytes(down.weight->rows, row_bytes);
    PlacedWeight shape;
    shape.cols = row_bytes;
    for (int64_t first = 0; first < down.weight->rows; first += most) {
      const int64_t rows = std::min(most, down.weight->rows - first);
      Chain pieces = {slice(weight_piece(*down.weight, down.name), static_cast<uint64_t>(first * row_bytes),
                            static_cast<uint64_t>(rows * row_bytes))};
      add_task(TaskKind::kPackDown, target + packed_down_bytes(first, row_bytes), shape, rows, std::move(pieces));
    }
  }

  const glint_model& model_;
  int32_t expert_first_;
  std::vector<LoadTask>& tasks_;
  int32_t layer_ = -1;
};

}

std::vector<LoadTask> plan_load_tasks(const PlacedWeights& placed, const glint_model& model, const ModelWeights& source,
                                      int32_t expert_first) {
  require(placed.layers.size() == source.layers.size(), GLINT_STATUS_INTERNAL, "there are places for ",
          placed.layers.size(), " layers and weights of ", source.layers.size());
  std::vector<LoadTask> tasks;
  TaskPlanner planner(model, expert_first, tasks);
  planner.add_ends(placed, source);
  for (size_t layer = 0; layer < placed.layers.size(); ++layer) {
    planner.add_layer(placed.layers[layer], source.layers[layer], static_cast<int32_t>(layer));
  }
  if (placed.mtp.eh_proj.rows > 0) planner.add_mtp(placed, source.mtp);
  return tasks;
}

uint64_t total_task_bytes(const std::vector<LoadTask>& tasks) {
  uint64_t bytes = 0;
  for (const LoadTask& task : tasks) bytes += task.byte_count;
  return bytes;
}

uint8_t* staging_target(const LoadTask& task, uint8_t* g_stage) {
  return task.kind == TaskKind::kCopy ? task.target : g_stage;
}

void launch_pack_task(const LoadTask& task, const uint8_t* g_stage, cudaStream_t stream) {
  const int64_t row_bytes = task.cols * element_bytes(task.element);
  const PackCall rows = {task.target, g_stage, g_stage + task.rows * row_bytes, task.rows, row_bytes, 1};
  switch (task.kind) {
    case TaskKind::kCopy:
      return;
    case TaskKind::kPackRows:
      return launch_pack_rows(rows, stream);
    case TaskKind::kPackGateUp:
      return launch_pack_gate_up(rows, stream);
    case TaskKind::kPackDown:
      return launch_pack_down(rows, stream);
    case TaskKind::kPackPortable:
      return launch_portable_pack({task.target, g_stage, task.rows, task.cols, row_bytes, task.element}, stream);
  }
}

}
