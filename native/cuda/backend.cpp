#include "cuda/backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "base/contract.h"
#include "cuda/check.h"
#include "cuda/comm/nccl.h"
#include "cuda/kernels/router/router.h"
#include "cuda/step_state.h"
#include "cuda/weights/loader.h"
#include "model/load_progress.h"

namespace glint {

namespace cuda {

namespace {

constexpr int32_t kWidestNorm = 8192;
constexpr int32_t kWidestInput = 12288;
constexpr int64_t kGatheredRows = 16;
constexpr int64_t kPeerRows = 64;

int32_t local_experts(const glint_model& model, const glint_engine_options& options) {
  require_argument(options.local_experts >= 0 && options.local_experts <= model.num_experts,
                   "options.local_experts is ", options.local_experts, ", expected 0 (all) to ", model.num_experts);
  require(options.local_experts == 0 || options.local_experts == model.num_experts || options.synthetic_seed != 0,
          GLINT_STATUS_UNSUPPORTED, "options.local_experts is ", options.local_experts, " of ", model.num_experts,
          ": a checkpoint needs all its experts; use 0");
  return options.local_experts == 0 ? model.num_experts : options.local_experts;
}

RankSlice device_slice(const glint_model& model, const glint_engine_options& options, int32_t rank) {
  RankSlice slice = rank_slice(model, options, rank);
  slice.model.mtp_vocab_size = model.vocab_size;
  if (options.num_ranks == 1) slice.expert_last = local_experts(model, options);
  return slice;
}

MtpPlacement planned_mtp(const glint_engine_options& options) {
  const bool may_have_own = options.synthetic_seed == 0;
  return {.is_placed = options.max_draft_tokens > 0,
          .has_own_embedding = may_have_own,
          .has_own_head = may_have_own,
          .head_element = GemmElement::kBf16};
}

MtpPlacement loaded_mtp(const glint_engine_options& options, const ModelWeights& weights) {
  const bool is_fp8 = weights.mtp.head.dtype == GLINT_DTYPE_F8_E4M3;
  return {.is_placed = options.max_draft_tokens > 0,
          .has_own_embedding = weights.mtp.embedding.data != weights.embedding.data,
          .has_own_head = weights.mtp.head.data != weights.lm_head.data,
          .head_element = is_fp8 ? GemmElement::kE4m3 : GemmElement::kBf16};
}

PlacementOptions placement_options(const RankSlice& slice, const DeviceProperties& device, const MtpPlacement& mtp) {
  return {.shares_device = device.is_shared,
          .num_local_experts = slice.num_experts(),
          .vocab_rows = slice.vocab_size(),
          .num_multiprocessors = device.num_multiprocessors,
          .mtp = mtp};
}

int64_t most_step_rows(const glint_engine_options& options) {
  const int32_t resumed_rows = options.max_draft_tokens > 0 ? options.max_step_items : 0;
  return std::max(options.max_step_tokens, options.max_step_items) + resumed_rows;
}

int64_t count_page_layers(const glint_model& model, const glint_engine_options& options) {
  return model.num_layers + (options.max_draft_tokens > 0 ? 1 : 0);
}

bool has_tiled_experts(const PlacedWeights& weights) {
  return std::ranges::any_of(weights.layers, [](const PlacedLayer& layer) { return layer.experts.is_tiled; });
}

void check_experts(const RankSlice& slice, const glint_engine_options& options) {
  const glint_model& model = slice.model;
  if (model.num_dense_layers == model.num_layers) return;
  const int32_t num_local = slice.num_experts();
  require(model.num_experts <= kMaxRouterExperts && num_local < kMaxLocalExperts &&
              model.experts_per_token <= kMaxExpertsPerToken,
          GLINT_STATUS_UNSUPPORTED, model.num_experts, " experts, ", num_local, " of them on this rank, ",
          model.experts_per_token, " for a token: CUDA takes at most ", kMaxRouterExperts, ", ", kMaxLocalExperts - 1,
          " and ", kMaxExpertsPerToken);
  const int64_t most_tokens = max_grouped_tokens(int64_t{num_local} + 1);
  require_argument(most_step_rows(options) <= most_tokens, "options.max_step_tokens is ", options.max_step_tokens,
                   " and max_step_items ", options.max_step_items, "; with ", num_local,
                   " experts a step on CUDA has at most ", most_tokens,
                   " tokens, with drafts max_step_items of them for cached prompts: lower options.max_step_tokens");
}

bool has_separate_shared(const PlacedWeights& weights) {
  return std::ranges::any_of(weights.layers, [](const PlacedLayer& layer) { return layer.shared.width > 0; });
}

int64_t most_gathered_rows(const glint_engine_options& options, int64_t max_tokens) {
  if (options.sequence_parallel == GLINT_SEQUENCE_PARALLEL_ON) return 0;
  return options.sequence_parallel == GLINT_SEQUENCE_PARALLEL_OFF ? max_tokens : std::min(max_tokens, kGatheredRows);
}

int64_t most_peer_rows(const glint_engine_options& options, int64_t max_tokens) {
  const bool is_alone = options.num_ranks == 1 && options.emulated_ranks == 0;
  const bool is_refused =
      options.all_reduce == GLINT_ALL_REDUCE_NCCL || options.sequence_parallel == GLINT_SEQUENCE_PARALLEL_ON;
  return is_alone || is_refused ? 0 : std::min(max_tokens, kPeerRows);
}

void check_widths(const glint_model& model) {
  const int32_t widest =
      std::max({model.num_heads * model.head_dim, model.dense_width, model.expert_width, model.shared_width});
  require(model.hidden_size <= kWidestNorm && widest <= kWidestInput, GLINT_STATUS_UNSUPPORTED, "hidden_size ",
          model.hidden_size, " and a GEMM's input of ", widest, ": CUDA takes up to ", kWidestNorm, " and ",
          kWidestInput);
  require(model.head_dim % 2 == 0, GLINT_STATUS_UNSUPPORTED, "head_dim ", model.head_dim,
          " is odd: CUDA attention takes even ones");
}

void check_ranks(const glint_engine_options& options) {
  require(options.num_ranks <= kMaxParts, GLINT_STATUS_UNSUPPORTED, "options.num_ranks is ", options.num_ranks,
          "; on CUDA there are at most ", kMaxParts);
  require(options.num_ranks == 1 || options.synthetic_seed == 0, GLINT_STATUS_UNSUPPORTED, "options.num_ranks is ",
          options.num_ranks, " with random weights: they are made for one rank, use num_ranks 1");
  require(options.emulated_ranks == 0 || (options.num_ranks == 1 && options.synthetic_seed != 0 &&
                                          options.emulated_ranks > 0 && options.emulated_ranks <= kMaxParts),
          GLINT_STATUS_UNSUPPORTED, "options.emulated_ranks is ", options.emulated_ranks, " with num_ranks ",
          options.num_ranks, ": one rank with random weights stands for up to ", kMaxParts, "; use 0");
  require(options.sequence_parallel != GLINT_SEQUENCE_PARALLEL_ON || options.all_reduce != GLINT_ALL_REDUCE_CUSTOM,
          GLINT_STATUS_UNSUPPORTED, "options.sequence_parallel is on and options.all_reduce custom: shards go through ",
          "NCCL; set options.all_reduce to auto or choose another options.sequence_parallel");
  require(options.shares_devices == 0 || options.kernels != GLINT_KERNELS_HOPPER, GLINT_STATUS_UNSUPPORTED,
          "options.shares_devices is ", options.shares_devices,
          " with the Hopper kernels: they need a GPU of their own, set options.kernels to portable");
}

PageElement page_element(const glint_engine_options& options) {
  if (options.kv_dtype == GLINT_DTYPE_F8_E4M3) return PageElement::kE4m3;
  require_argument(options.kv_dtype == 0 || options.kv_dtype == GLINT_DTYPE_BF16, "options.kv_dtype is ",
                   options.kv_dtype, "; keys and values are kept in ", GLINT_DTYPE_BF16, " (BF16, also 0) or ",
                   GLINT_DTYPE_F8_E4M3, " (E4M3)");
  return rounds_new_pages ? PageElement::kBf16OfE4m3 : PageElement::kBf16;
}

int64_t layer_page_bytes(const glint_model& model, PageElement element) {
  return 2 * model.num_kv_heads * page_head_bytes(model.head_dim, element);
}

KvPages kv_pages(std::byte* data, const glint_model& model, int64_t count, PageElement element) {
  const int64_t head_bytes = page_head_bytes(model.head_dim, element);
  const int64_t page_bytes = model.num_kv_heads * head_bytes;
  return {.keys = data,
          .values = data + count * page_bytes,
          .page_bytes = page_bytes,
          .head_bytes = head_bytes,
          .element = element};
}

void check_options(const RankSlice& slice, const glint_engine_options& options) {
  const glint_model& model = slice.model;
  check_ranks(options);
  check_experts(slice, options);
  check_widths(model);
  require_argument(options.page_tokens == kPageTokens, "options.page_tokens is ", options.page_tokens,
                   "; on CUDA a page has ", kPageTokens, " tokens");
  require(options.row_slices == options.num_ranks, GLINT_STATUS_UNSUPPORTED, "options.row_slices is ",
          options.row_slices, "; on CUDA it equals num_ranks, ", options.num_ranks);
  require(model.head_dim <= kMaxHeadDim && model.num_heads / model.num_kv_heads <= kMaxGroupHeads,
          GLINT_STATUS_UNSUPPORTED, "head_dim ", model.head_dim, " with ", model.num_heads / model.num_kv_heads,
          " query heads per KV head: CUDA attention takes head_dim up to ", kMaxHeadDim, " and up to ", kMaxGroupHeads,
          " query heads per KV head");
}

uint64_t weight_bytes(const glint_model& model, const PlacementOptions& options) {
  Arena arena;
  place_weights(model, options, arena);
  return arena.used();
}

uint64_t workspace_bytes(const glint_model& model, const StepLimits& limits) {
  Arena arena;
  lay_out_workspace(model, limits, arena);
  return arena.used();
}

PlacedWeights load(const RankSlice& slice, const glint_engine_options& options, const DeviceProperties& device,
                   const ModelWeights& source, std::byte* memory) {
  Arena arena(memory);
  PlacedWeights placed =
      place_weights(slice.model, placement_options(slice, device, loaded_mtp(options, source)), arena);
  if (options.synthetic_seed != 0) {
    fill_synthetic_weights(placed, slice.model, options.synthetic_seed);
  } else {
    load_weights(placed, slice, source);
  }
  return placed;
}

}

StepLimits step_limits(const RankSlice& slice, const glint_engine_options& options, const DeviceProperties& device) {
  Arena counter;
  const PlacedWeights weights = place_weights(slice.model, placement_options(slice, device, {}), counter);
  const int64_t max_tokens = most_step_rows(options);
  return {.max_tokens = max_tokens,
          .max_items = options.max_step_items,
          .max_context_tokens = options.max_context_tokens,
          .num_local_experts = slice.num_experts(),
          .has_tiled_experts = has_tiled_experts(weights),
          .stores_down_rows = stores_down_rows(slice.model.hidden_size, slice.model.expert_width, device.multiply()),
          .has_separate_shared = has_separate_shared(weights),
          .num_ranks = std::max(slice.num_ranks, options.emulated_ranks),
          .vocab_rows = slice.vocab_size(),
          .gathered_rows = most_gathered_rows(options, max_tokens),
          .peer_rows = most_peer_rows(options, max_tokens),
          .samples = slice.is_first(),
          .max_drafts = options.max_draft_tokens};
}

int64_t bytes_per_page(const glint_model& model, PageElement element, int64_t num_layers) {
  const int64_t widened = holds_fp8(element) ? layer_page_bytes(model, PageElement::kBf16) : 0;
  const int64_t state = num_layers > model.num_layers ? model.hidden_size * static_cast<int64_t>(sizeof(float)) : 0;
  return num_layers * layer_page_bytes(model, element) + widened + state;
}

}

namespace {

std::shared_ptr<const cuda::Nccl> load_nccl(const glint_engine_options& options) {
  if (options.num_ranks == 1) return nullptr;
  cuda::prepare_nccl_environment(options.shares_devices != 0);
  return cuda::Nccl::load("");
}

template <typename Query>
void poll_with_peers(Backend& backend, const char* name, const Query& query) {
  constexpr auto kPause = std::chrono::microseconds(20);
  for (;;) {
    const cudaError_t state = query();
    backend.collectives->check_async();
    if (backend.peers.has_value()) backend.peers->check_async();
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) cuda::check(state, name);
    std::this_thread::sleep_for(kPause);
  }
}

}

World::World(const glint_engine_options& options)
    : group(options.num_ranks, options.shares_devices != 0, load_nccl(options)) {
  load_progress().begin(0);
}

WorldOwner make_world(const glint_engine_options& options) { return WorldOwner(new World(options)); }

void WorldDeleter::operator()(World* world) const { delete world; }

void stop_world(World& world, const std::string& why) noexcept { world.group.abort(why); }

void join_world(Backend& backend) {
  if (!backend.has_peers()) return;
  constexpr double kSeconds = 60.0;
  backend.collectives->open({.scratch = reinterpret_cast<std::byte*>(backend.workspace.branch_output),
                             .scratch_bytes = backend.branch_output_bytes(),
                             .stream = backend.stream,
                             .communication_stream = backend.communication->stream(),
                             .deadline = cuda::deadline_after(kSeconds)});
  if (!backend.peers.has_value()) return;
  backend.peers->open(backend.stream, cuda::deadline_after(kSeconds));
  require(backend.peers->is_available() || backend.all_reduce != GLINT_ALL_REDUCE_CUSTOM, GLINT_STATUS_UNSUPPORTED,
          "options.all_reduce is custom, which cannot be used: ", backend.peers->refusal(),
          "; set options.all_reduce to auto or nccl");
  if (!backend.peers->is_available()) backend.peers.reset();
}

Backend::Backend(const RankSlice& the_slice, const glint_engine_options& options, const ModelWeights& whole,
                 World& world)
    : slice(the_slice),
      model(slice.model),
      all_reduce(options.all_reduce),
      device(cuda::find_device(options, slice.rank)),
      limits(cuda::step_limits(slice, options, device)),
      num_pages(options.num_pages),
      num_page_layers(cuda::count_page_layers(model, options)),
      page_element(cuda::page_element(options)),
      weight_memory(cuda::weight_bytes(model, cuda::placement_options(slice, device, cuda::loaded_mtp(options, whole))),
                    "weights"),
      weights(cuda::load(slice, options, device, whole, weight_memory.data())),
      page_memory(static_cast<uint64_t>((num_pages + 1) * cuda::bytes_per_page(model, page_element, num_page_layers)),
                  "pages"),
      workspace_memory(cuda::workspace_bytes(model, limits), "workspace"),
      staging(model, limits),
      graphs(limits.max_items) {
  cuda::Arena arena(workspace_memory.data());
  workspace = cuda::lay_out_workspace(model, limits, arena);
  GLINT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  if (limits.has_mtp()) draft_graphs.emplace(limits.max_items);
  if (limits.has_mtp() && cuda::fits_fused_attention(*this)) verify_graphs.emplace(limits.max_items);
  if (limits.num_ranks > 1) communication.emplace();
  if (has_peers()) collectives.emplace(world.group, slice.rank);
  if (has_peers() && limits.peer_rows > 0) {
    peers.emplace(world.group, slice.rank, workspace.peers, limits.peer_rows, model.hidden_size);
  }
}

uint64_t Backend::branch_output_bytes() const {
  return static_cast<uint64_t>(cuda::branch_output_floats(model, limits)) * sizeof(float);
}

void Backend::wait_for_stream() {
  if (!has_peers()) return GLINT_CHECK_CUDA(cudaStreamSynchronize(stream));
  poll_with_peers(*this, "cudaStreamQuery", [this] { return cudaStreamQuery(stream); });
}

void Backend::wait_for_event(cudaEvent_t event) {
  if (!has_peers()) return GLINT_CHECK_CUDA(cudaEventSynchronize(event));
  poll_with_peers(*this, "cudaEventQuery", [event] { return cudaEventQuery(event); });
}

Backend::~Backend() {
  if (stream == nullptr) return;
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
}

cuda::KvPages Backend::pages(int64_t layer) const {
  std::byte* data = page_memory.data() + layer * (num_pages + 1) * cuda::layer_page_bytes(model, page_element);
  return cuda::kv_pages(data, model, num_pages + 1, page_element);
}

cuda::KvPages Backend::widened_pages() const {
  std::byte* data =
      page_memory.data() + num_page_layers * (num_pages + 1) * cuda::layer_page_bytes(model, page_element);
  return cuda::kv_pages(data, model, num_pages + 1, cuda::PageElement::kBf16);
}

float* Backend::page_states() const {
  const int64_t state_bytes = (num_pages + 1) * model.hidden_size * static_cast<int64_t>(sizeof(float));
  return reinterpret_cast<float*>(page_memory.data() + page_memory.byte_count() - state_bytes);
}

cuda::Operand Backend::operand(int64_t width) const {
  return {.rows = workspace.operand_rows,
          .scales = is_fp8() ? workspace.operand_scales : nullptr,
          .stride_bytes = cuda::operand_row_bytes(model, width)};
}

cuda::Operand Backend::gated_operand(int64_t width) const {
  return {.rows = workspace.gated_rows,
          .scales = is_fp8() ? workspace.gated_scales : nullptr,
          .stride_bytes = cuda::operand_row_bytes(model, width)};
}

void BackendDeleter::operator()(Backend* backend) const { delete backend; }

BackendOwner make_backend(const glint_model& model, const glint_engine_options& options, const ModelWeights& weights,
                          World& world, int32_t rank) {
  const RankSlice slice = cuda::device_slice(model, options, rank);
  cuda::check_options(slice, options);
  return BackendOwner(new Backend(slice, options, weights, world));
}

glint_engine_plan plan_backend(const glint_model& model, const glint_engine_options& options) {
  const RankSlice slice = cuda::device_slice(model, options, 0);
  cuda::check_options(slice, options);
  if (options.num_ranks > 1) cuda::prepare_nccl_environment(options.shares_devices != 0);
  const cuda::DeviceProperties device = cuda::fullest_device(options);
  const cuda::StepLimits limits = cuda::step_limits(slice, options, device);
  const auto bytes_per_page = static_cast<uint64_t>(
      cuda::bytes_per_page(slice.model, cuda::page_element(options), cuda::count_page_layers(slice.model, options)));
  glint_engine_plan plan{};
  plan.struct_bytes = sizeof(glint_engine_plan);
  plan.kernels = device.kernels;
  std::strncpy(plan.device_name, device.name.c_str(), sizeof(plan.device_name) - 1);
  plan.memory_total = device.memory_total;
  plan.memory_free = device.memory_free;
  plan.weight_bytes =
      cuda::weight_bytes(slice.model, cuda::placement_options(slice, device, cuda::planned_mtp(options)));
  plan.workspace_bytes = cuda::workspace_bytes(slice.model, limits) + bytes_per_page;
  plan.pinned_bytes = cuda::Staging::pinned_bytes(slice.model, limits) + cuda::loader_pinned_bytes(options.num_ranks);
  plan.bytes_per_page = bytes_per_page;
  return plan;
}

glint_device describe_backend_device(int32_t index, int32_t kernels) {
  glint_device device{};
  device.struct_bytes = sizeof(glint_device);
  cuda::describe_device(index, kernels, device);
  return device;
}

const char* backend_name() { return "cuda"; }

bool backend_checks_fp8_values() { return true; }

void fill_backend_stats(const Backend& backend, glint_engine_stats& stats) {
  stats.kernels = backend.device.kernels;
  stats.page_bytes = backend.page_memory.byte_count();
  stats.workspace_bytes = backend.workspace_memory.byte_count();
  stats.weight_bytes_placed = backend.weight_memory.byte_count();
  stats.experts_read = backend.experts_read;
  stats.steps_replayed = backend.steps_replayed;
  if (!backend.has_peers()) return;
  stats.collectives_run = backend.collectives->counts().collectives;
  stats.collective_bytes = backend.collectives->counts().bytes_sent;
}

namespace ops {

double read_bytes_per_second(Backend& backend, uint64_t byte_count) {
  const cuda::DeviceMemory memory(byte_count, "the read measurement");
  return cuda::measure_read(memory, backend.stream);
}

void measure_arithmetic(Backend&, glint_arithmetic&) {
  throw Failure(GLINT_STATUS_UNSUPPORTED,
                "the CUDA library does not measure arithmetic; use the CPU library, or glint bench kernels");
}

void read_logits(Backend& backend, float* out, int64_t count) {
  GLINT_CHECK_CUDA(cudaStreamSynchronize(backend.stream));
  GLINT_CHECK_CUDA(cudaMemcpy(out, backend.workspace.logits,
                              static_cast<size_t>(count * backend.model.vocab_size) * sizeof(float),
                              cudaMemcpyDeviceToHost));
}

void fill_pages(Backend& backend, std::byte value) {
  GLINT_CHECK_CUDA(cudaMemsetAsync(backend.page_memory.data(), std::to_integer<int>(value),
                                   backend.page_memory.byte_count(), backend.stream));
  GLINT_CHECK_CUDA(cudaStreamSynchronize(backend.stream));
}

}

}
