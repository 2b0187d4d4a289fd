#include "cpu/backend.h"

#include <algorithm>

#include "base/contract.h"
#include "cpu/machine.h"
#include "cpu/layers.h"

namespace glint {

namespace {

int32_t page_dtype(const glint_model& model) {
  return model.weight_scale_kind == GLINT_SCALE_NONE ? GLINT_DTYPE_F32 : GLINT_DTYPE_BF16;
}

void check_options(const glint_model& model, const glint_engine_options& options) {
  require(options.all_reduce == GLINT_ALL_REDUCE_AUTO, GLINT_STATUS_UNSUPPORTED, "options.all_reduce is ",
          options.all_reduce, ": ranks of the CPU library share memory and add in one way; use 0");
  require(options.emulated_ranks == 0, GLINT_STATUS_UNSUPPORTED, "options.emulated_ranks is ", options.emulated_ranks,
          ": the CPU library runs real ranks; use 0");
  require(options.shares_devices == 0, GLINT_STATUS_UNSUPPORTED, "options.shares_devices is ", options.shares_devices,
          ": the CPU library has no devices to share; use 0");
  require(options.synthetic_seed == 0, GLINT_STATUS_UNSUPPORTED, "options.synthetic_seed is ", options.synthetic_seed,
          ": the CPU library computes with the weights of a checkpoint; use 0, or the CUDA library");
  require(options.local_experts == 0 || options.local_experts == model.num_experts, GLINT_STATUS_UNSUPPORTED,
          "options.local_experts is ", options.local_experts, ": the CPU library holds all ", model.num_experts,
          " experts; use 0, or the CUDA library");
  require(options.kv_dtype == 0 || options.kv_dtype == GLINT_DTYPE_F8_E4M3 || options.kv_dtype == page_dtype(model),
          GLINT_STATUS_UNSUPPORTED, "options.kv_dtype is ", options.kv_dtype, "; the CPU library keeps this model's ",
          "keys and values in ", page_dtype(model), " (also 0), or rounds them to ", GLINT_DTYPE_F8_E4M3, " (E4M3)");
}

cpu::WorkerOptions worker_options(const glint_model& model, const glint_engine_options& options) {
  return {.num_threads = std::max(options.num_threads / options.num_ranks, 1),
          .kernels = options.kernels,
          .max_gemm_calls = cpu::max_gemm_calls(model, options.row_slices),
          .max_step_items = options.max_step_items,
          .vocab_size = model.vocab_size,
          .max_cols = std::max({2 * model.hidden_size, model.num_heads * model.head_dim, model.dense_width,
                                model.expert_width, model.shared_width}),
          .group_heads = model.num_heads / model.num_kv_heads,
          .head_dim = model.head_dim,
          .page_tokens = options.page_tokens};
}

int64_t page_state_floats(const glint_model& model, const glint_engine_options& options) {
  return options.max_draft_tokens > 0 ? model.hidden_size : 0;
}

uint64_t workspace_bytes_of_all(const cpu::Workspace& first, const glint_model& model,
                                const glint_engine_options& options) {
  const uint64_t only_of_first = first.logits.byte_count();
  const uint64_t of_each = first.byte_count - only_of_first + cpu::Workers::bytes_for(worker_options(model, options));
  return only_of_first + static_cast<uint64_t>(options.num_ranks) * of_each;
}

cpu::PageLayout page_layout(const glint_model& model, const glint_engine_options& options) {
  return {.data = nullptr,
          .num_pages = options.num_pages,
          .page_tokens = options.page_tokens,
          .num_kv_heads = model.num_kv_heads,
          .head_dim = model.head_dim,
          .dtype = page_dtype(model),
          .rounds_to_e4m3 = options.kv_dtype == GLINT_DTYPE_F8_E4M3 || rounds_new_pages};
}

uint64_t layer_bytes_per_page(const glint_model& model, const glint_engine_options& options,
                              const cpu::PageLayout& layout) {
  const int32_t num_layers = model.num_layers + (options.max_draft_tokens > 0 ? 1 : 0);
  return 2 * static_cast<uint64_t>(num_layers) * static_cast<uint64_t>(layout.page_bytes());
}

uint64_t bytes_per_page(const glint_model& model, const glint_engine_options& options, const cpu::PageLayout& layout) {
  const auto state_bytes = static_cast<uint64_t>(page_state_floats(model, options)) * sizeof(float);
  return layer_bytes_per_page(model, options, layout) + state_bytes;
}

uint64_t page_memory_bytes(const glint_model& model, const glint_engine_options& options,
                           const cpu::PageLayout& layout) {
  constexpr uint64_t kMaxBytes = uint64_t{1} << 46;
  const uint64_t page_bytes = bytes_per_page(model, options, layout);
  const auto num_pages = static_cast<uint64_t>(layout.num_pages);
  require_argument(num_pages <= kMaxBytes / page_bytes, "options.num_pages is ", num_pages, ": pages of ", page_bytes,
                   " bytes each exceed ", kMaxBytes, " bytes");
  return num_pages * layer_bytes_per_page(model, options, layout);
}

}

Backend::Backend(const RankSlice& the_slice, const glint_engine_options& options, const ModelWeights& whole,
                 World& world)
    : slice(the_slice),
      model(slice.model),
      weights(slice_weights(whole, slice)),
      row_slices(slice.row_slices),
      expert_layout(options.expert_layout),
      sequence_parallel(options.sequence_parallel),
      max_step_items(options.max_step_items),
      heads{model.num_heads, model.num_kv_heads, model.head_dim, model.rotary_dim},
      pages(page_layout(model, options)),
      page_memory(page_memory_bytes(model, options, pages)),
      page_states(static_cast<uint64_t>(options.num_pages * page_state_floats(model, options))),
      workspace(slice, options),
      workspace_bytes(workspace_bytes_of_all(workspace, model, options)),
      collectives(world, slice.rank),
      workers(worker_options(model, options)) {
  pages.data = page_memory.data();
  calls.reserve(static_cast<size_t>(cpu::max_gemm_calls(model, row_slices)));
}

void BackendDeleter::operator()(Backend* backend) const { delete backend; }

BackendOwner make_backend(const glint_model& model, const glint_engine_options& options, const ModelWeights& weights,
                          World& world, int32_t rank) {
  check_options(model, options);
  return BackendOwner(new Backend(rank_slice(model, options, rank), options, weights, world));
}

void join_world(Backend&) {}

glint_engine_plan plan_backend(const glint_model& model, const glint_engine_options& options) {
  check_options(model, options);
  const RankSlice slice = rank_slice(model, options, 0);
  const cpu::PageLayout layout = page_layout(slice.model, options);
  page_memory_bytes(slice.model, options, layout);
  glint_engine_plan plan{
      .struct_bytes = sizeof(glint_engine_plan),
      .kernels = choose_kernels(options.kernels).id,
      .device_name = {},
      .memory_total = cpu::machine_memory(),
      .memory_free = cpu::available_memory(),
      .weight_bytes = 0,
      .workspace_bytes = workspace_bytes_of_all(cpu::Workspace(slice, options), slice.model, options),
      .pinned_bytes = 0,
      .bytes_per_page = static_cast<uint64_t>(options.num_ranks) * bytes_per_page(slice.model, options, layout),
  };
  cpu::processor_name().copy(plan.device_name, sizeof(plan.device_name) - 1);
  return plan;
}

glint_device describe_backend_device(int32_t index, int32_t kernels) {
  require_argument(index == 0, "the device index is ", index, ", and the CPU is device 0 alone");
  glint_device device{};
  device.struct_bytes = sizeof(glint_device);
  device.num_devices = 1;
  device.kernels = choose_kernels(kernels).id;
  device.memory_total = cpu::machine_memory();
  device.memory_free = cpu::available_memory();
  cpu::processor_name().copy(device.name, sizeof(device.name) - 1);
  return device;
}

const char* backend_name() { return "cpu"; }

bool backend_checks_fp8_values() { return false; }

void fill_backend_stats(const Backend& backend, glint_engine_stats& stats) {
  stats.kernels = backend.workers.kernels().id;
  const uint64_t page_bytes = backend.page_memory.byte_count() + backend.page_states.byte_count();
  stats.page_bytes = static_cast<uint64_t>(backend.slice.num_ranks) * page_bytes;
  stats.workspace_bytes = backend.workspace_bytes;
  stats.weight_bytes_placed = 0;
  stats.experts_read = backend.experts_read;
  stats.steps_replayed = 0;
  stats.collectives_run = backend.collectives.num_run();
  stats.collective_bytes = backend.collectives.bytes_sent();
}

namespace ops {

void read_logits(Backend& backend, float* out, int64_t count) {
  std::copy_n(backend.workspace.logits.data(), count * backend.model.vocab_size, out);
}

void fill_pages(Backend& backend, std::byte value) {
  std::fill_n(backend.page_memory.data(), backend.page_memory.byte_count(), value);
}

}

}
