#include "cuda/backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/rounded_pages.h"
#include "cuda/bandwidth.h"
#include "cuda/check.h"
#include "cuda/layers.h"
#include "cuda/weights/loader.h"
#include "cuda/kernels/router/router.h"

namespace glint {

namespace cuda {

namespace {

constexpr int32_t kHopperMajor = 9;
constexpr size_t kNeededSharedBytes = cuda::kSharedLimitBytes;
constexpr int32_t kWidestNorm = 8192;
constexpr int32_t kWidestCodes = 12288;
constexpr int64_t kGatheredRows = 16;
constexpr int64_t kPeerRows = 64;

int32_t choose_kernels(int32_t requested, int32_t compute_major) {
  const bool is_hopper = compute_major == kHopperMajor;
  if (requested == GLINT_KERNELS_AUTO) return is_hopper ? GLINT_KERNELS_HOPPER : GLINT_KERNELS_PORTABLE;
  require(requested == GLINT_KERNELS_PORTABLE || (requested == GLINT_KERNELS_HOPPER && is_hopper),
          GLINT_STATUS_UNSUPPORTED, "options.kernels is ", requested,
          ", which this GPU cannot run: CUDA has the kernels portable, and hopper on compute capability 9");
  return requested;
}

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
  if (options.num_ranks == 1) slice.expert_last = local_experts(model, options);
  return slice;
}

PlacementOptions placement_options(const RankSlice& slice, const DeviceFacts& device) {
  return {.kernels = device.kernels,
          .num_local_experts = slice.num_experts(),
          .vocab_rows = slice.vocab_size(),
          .num_multiprocessors = device.num_multiprocessors};
}

bool has_hopper_experts(const PlacedWeights& weights) {
  return std::ranges::any_of(weights.layers, [](const PlacedLayer& layer) { return layer.experts.is_hopper; });
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
  require_argument(std::max(options.max_step_tokens, options.max_step_items) <= most_tokens,
                   "options.max_step_tokens is ", options.max_step_tokens, " and max_step_items ",
                   options.max_step_items, "; with ", num_local, " experts a step on CUDA has at most ", most_tokens,
                   " tokens: lower --max-num-batched-tokens");
}

bool has_shared_apart(const PlacedWeights& weights) {
  return std::ranges::any_of(weights.layers, [](const PlacedLayer& layer) { return layer.shared.width > 0; });
}

int64_t most_gathered_rows(const glint_engine_options& options, int64_t max_tokens) {
  if (options.exchange == GLINT_EXCHANGE_SHARDED) return 0;
  return options.exchange == GLINT_EXCHANGE_REPLICATED ? max_tokens : std::min(max_tokens, kGatheredRows);
}

int64_t most_peer_rows(const glint_engine_options& options, int64_t max_tokens) {
  const bool is_alone = options.num_ranks == 1 && options.emulated_ranks == 0;
  const bool is_refused = options.all_reduce == GLINT_ALL_REDUCE_NCCL || options.exchange == GLINT_EXCHANGE_SHARDED;
  return is_alone || is_refused ? 0 : std::min(max_tokens, kPeerRows);
}

void check_widths(const glint_model& model) {
  const int32_t codes = std::max({model.num_heads * model.head_dim, model.dense_width, model.expert_width,
                                  model.shared_width});
  require(model.hidden_size <= kWidestNorm && codes <= kWidestCodes, GLINT_STATUS_UNSUPPORTED, "hidden_size ",
          model.hidden_size, " and a product's input of ", codes, ": CUDA takes up to ", kWidestNorm, " and ",
          kWidestCodes);
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
  require(options.exchange != GLINT_EXCHANGE_SHARDED || options.all_reduce != GLINT_ALL_REDUCE_CUSTOM,
          GLINT_STATUS_UNSUPPORTED, "options.exchange is sharded and options.all_reduce custom: shards go through NCCL; ",
          "use --all-reduce auto or another --exchange");
  require(options.shares_devices == 0 || options.kernels != GLINT_KERNELS_HOPPER, GLINT_STATUS_UNSUPPORTED,
          "options.shares_devices is ", options.shares_devices,
          " with the Hopper kernels: they need a GPU of their own, use --kernels portable");
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

KvPages page_pool(std::byte* data, const glint_model& model, int64_t count, PageElement element) {
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
          " query heads per KV head: CUDA attention takes head_dim up to ", kMaxHeadDim, " and up to ",
          kMaxGroupHeads, " query heads per KV head");
}

uint64_t weight_bytes(const glint_model& model, const PlacementOptions& options) {
  Arena arena;
  place_weights(model, options, arena);
  return arena.used();
}

uint64_t workspace_bytes(const glint_model& model, const StepLimits& limits) {
  Arena arena;
  lay_out_activations(model, limits, arena);
  return arena.used();
}

PlacedWeights load(const RankSlice& slice, const glint_engine_options& options, const DeviceFacts& device,
                   const ModelWeights& source, std::byte* memory) {
  Arena arena(memory);
  PlacedWeights placed = place_weights(slice.model, placement_options(slice, device), arena);
  if (options.synthetic_seed != 0) {
    fill_synthetic_weights(placed, slice.model, options.synthetic_seed);
  } else {
    load_weights(placed, slice, source);
  }
  return placed;
}

}

DeviceFacts find_device(const glint_engine_options& options, int32_t rank) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  require(error == cudaSuccess && count > 0, GLINT_STATUS_UNSUPPORTED, "no NVIDIA GPU can be used: ",
          error == cudaSuccess ? "none is visible" : cudaGetErrorString(error),
          "; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu");
  cudaDeviceProp properties{};
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  require(options.num_ranks <= count || options.shares_devices != 0, GLINT_STATUS_UNSUPPORTED, "options.num_ranks is ",
          options.num_ranks, " and ", count, " GPUs are visible: lower --tp, or check CUDA_VISIBLE_DEVICES");
  const int device = rank % count;
  GLINT_CHECK_CUDA(cudaSetDevice(device));
  GLINT_CHECK_CUDA(cudaGetDeviceProperties(&properties, device));
  require(properties.major >= kHopperMajor && properties.sharedMemPerBlockOptin >= kNeededSharedBytes,
          GLINT_STATUS_UNSUPPORTED, properties.name, " has compute capability ", properties.major, ".",
          properties.minor, " and ", properties.sharedMemPerBlockOptin,
          " bytes of shared memory for a thread block; the kernels need 9.0 (Hopper) or newer and ",
          kNeededSharedBytes);
  GLINT_CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  return {.name = properties.name,
          .index = device,
          .kernels = choose_kernels(options.shares_devices != 0 ? GLINT_KERNELS_PORTABLE : options.kernels,
                                    properties.major),
          .num_multiprocessors = properties.multiProcessorCount,
          .memory_total = total_bytes,
          .memory_free = free_bytes};
}

DeviceFacts fullest_device(const glint_engine_options& options) {
  DeviceFacts fullest = find_device(options, 0);
  for (int32_t rank = 1; rank < options.num_ranks; ++rank) {
    const DeviceFacts facts = find_device(options, rank);
    if (facts.memory_free < fullest.memory_free) fullest = facts;
  }
  GLINT_CHECK_CUDA(cudaSetDevice(0));
  return fullest;
}

StepLimits step_limits(const RankSlice& slice, const glint_engine_options& options, const DeviceFacts& device) {
  Arena counter;
  const PlacedWeights weights = place_weights(slice.model, placement_options(slice, device), counter);
  const int64_t max_tokens = std::max(options.max_step_tokens, options.max_step_items);
  return {.max_tokens = max_tokens,
          .max_items = options.max_step_items,
          .max_context_tokens = options.max_context_tokens,
          .num_local_experts = slice.num_experts(),
          .has_hopper_experts = has_hopper_experts(weights),
          .has_shared_apart = has_shared_apart(weights),
          .num_ranks = std::max(slice.num_ranks, options.emulated_ranks),
          .vocab_rows = slice.vocab_size(),
          .gathered_rows = most_gathered_rows(options, max_tokens),
          .peer_rows = most_peer_rows(options, max_tokens),
          .decides = slice.is_first()};
}

int64_t bytes_per_page(const glint_model& model, PageElement element) {
  const int64_t widened = holds_fp8(element) ? layer_page_bytes(model, PageElement::kBf16) : 0;
  return model.num_layers * layer_page_bytes(model, element) + widened;
}

}

Backend::Backend(const RankSlice& the_slice, const glint_engine_options& options, const ModelWeights& whole,
                 World& world)
    : slice(the_slice),
      model(slice.model),
      all_reduce(options.all_reduce),
      device(cuda::find_device(options, slice.rank)),
      limits(cuda::step_limits(slice, options, device)),
      num_pages(options.num_pages),
      page_element(cuda::page_element(options)),
      weight_memory(cuda::weight_bytes(model, cuda::placement_options(slice, device)), "weights"),
      weights(cuda::load(slice, options, device, whole, weight_memory.data())),
      page_memory(static_cast<uint64_t>((num_pages + 1) * cuda::bytes_per_page(model, page_element)), "pages"),
      workspace_memory(cuda::workspace_bytes(model, limits), "workspace"),
      staging(model, limits),
      graphs(limits.max_items) {
  cuda::Arena arena(workspace_memory.data());
  places = cuda::lay_out_activations(model, limits, arena);
  GLINT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  if (limits.num_ranks > 1) side.emplace();
  if (has_peers()) collectives.emplace(world.group, slice.rank);
  if (has_peers() && limits.peer_rows > 0) {
    peers.emplace(world.group, slice.rank, places.peers, limits.peer_rows, model.hidden_size);
  }
}

uint64_t Backend::update_bytes() const {
  return static_cast<uint64_t>(cuda::update_floats(model, limits)) * sizeof(float);
}

Backend::~Backend() {
  if (stream == nullptr) return;
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
}

cuda::KvPages Backend::pages(int64_t layer) const {
  std::byte* data = page_memory.data() + layer * (num_pages + 1) * cuda::layer_page_bytes(model, page_element);
  return cuda::page_pool(data, model, num_pages + 1, page_element);
}

cuda::KvPages Backend::widened_pages() const {
  std::byte* data =
      page_memory.data() + model.num_layers * (num_pages + 1) * cuda::layer_page_bytes(model, page_element);
  return cuda::page_pool(data, model, num_pages + 1, cuda::PageElement::kBf16);
}

cuda::Operand Backend::operand(int64_t width) const {
  const bool has_codes = cuda::weight_element(model) == cuda::GemmElement::kE4m3;
  return {.rows = places.operand_rows,
          .scales = has_codes ? places.operand_scales : nullptr,
          .stride_bytes = cuda::operand_row_bytes(model, width)};
}

cuda::Operand Backend::gated_operand(int64_t width) const {
  const bool has_codes = cuda::weight_element(model) == cuda::GemmElement::kE4m3;
  return {.rows = places.gated_rows,
          .scales = has_codes ? places.gated_scales : nullptr,
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
  const DeviceFacts device = cuda::fullest_device(options);
  const cuda::StepLimits limits = cuda::step_limits(slice, options, device);
  const auto bytes_per_page = static_cast<uint64_t>(cuda::bytes_per_page(slice.model, cuda::page_element(options)));
  glint_engine_plan plan{};
  plan.struct_bytes = sizeof(glint_engine_plan);
  plan.kernels = device.kernels;
  std::strncpy(plan.device_name, device.name.c_str(), sizeof(plan.device_name) - 1);
  plan.memory_total = device.memory_total;
  plan.memory_free = device.memory_free;
  plan.weight_bytes = cuda::weight_bytes(slice.model, cuda::placement_options(slice, device));
  plan.workspace_bytes = cuda::workspace_bytes(slice.model, limits) + bytes_per_page;
  plan.pinned_bytes = cuda::Staging::pinned_bytes(slice.model, limits) + cuda::loader_pinned_bytes(options.num_ranks);
  plan.bytes_per_page = bytes_per_page;
  return plan;
}

const char* backend_name() { return "cuda"; }

bool backend_checks_codes() { return true; }

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

void read_hidden(Backend& backend, float* out) {
  cuda::add_update(backend);
  GLINT_CHECK_CUDA(cudaStreamSynchronize(backend.stream));
  GLINT_CHECK_CUDA(cudaMemcpy(out, backend.places.hidden,
                              static_cast<size_t>(backend.num_rows * backend.model.hidden_size) * sizeof(float),
                              cudaMemcpyDeviceToHost));
}

void write_hidden(Backend& backend, const float* in) {
  cuda::add_update(backend);
  GLINT_CHECK_CUDA(cudaMemcpyAsync(backend.places.hidden, in,
                                   static_cast<size_t>(backend.num_rows * backend.model.hidden_size) * sizeof(float),
                                   cudaMemcpyHostToDevice, backend.stream));
  GLINT_CHECK_CUDA(cudaStreamSynchronize(backend.stream));
}

void read_logits(Backend& backend, float* out, int64_t count) {
  GLINT_CHECK_CUDA(cudaStreamSynchronize(backend.stream));
  GLINT_CHECK_CUDA(cudaMemcpy(out, backend.places.logits,
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
