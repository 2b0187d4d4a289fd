#include "cuda/bench/step_pages.h"
#include "cuda/quantise.h"

namespace glint::cuda::bench {

namespace {

constexpr int kHeads = 12;
constexpr int kDims = 128;
constexpr int kWidth = kHeads * kDims;
constexpr int kInWidth = kWidth + 2 * kDims;
constexpr int kRotary = 64;

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

struct CodeRows {
  CodeRows(int64_t rows, int64_t row_stride)
      : stride(row_stride), codes(as_size(rows * row_stride)), scales(as_size(rows)) {}

  int64_t stride;
  DeviceArray<uint8_t> codes;
  DeviceArray<float> scales;
};

void quantise_apart(const CodeRows& rows, const float* out, int64_t count, cudaStream_t stream) {
  launch_quantise({.codes = rows.codes.data(),
                   .scales = rows.scales.data(),
                   .in = out,
                   .in_stride = kWidth,
                   .count = count,
                   .width = kWidth,
                   .row_slices = 1,
                   .slice_stride = rows.stride},
                  stream);
}

DecodeCall coded_call(const DecodeRun& run, const CodeRows& rows, float* out) {
  DecodeCall call = run.call(out);
  call.only_last_is_new = true;
  call.codes = rows.codes.data();
  call.scales = rows.scales.data();
  call.code_stride = rows.stride;
  return call;
}

void check_codes(Report& report, const std::string& name, const Lengths& lengths, int64_t stride) {
  const PagedBatch batch({}, lengths, 19 + lengths.size());
  const DecodeRun run(batch, all_rows(batch));
  DeviceArray<float> out(batch.out_floats());
  DeviceArray<float> same_out(batch.out_floats());
  CodeRows wanted(batch.num_rows, stride);
  CodeRows fused(batch.num_rows, stride);
  CodeRows codes_only(batch.num_rows, stride);
  launch_attention_decode(run.call(out.data()), nullptr);
  quantise_apart(wanted, out.data(), batch.num_rows, nullptr);
  launch_attention_decode(coded_call(run, fused, same_out.data()), nullptr);
  launch_attention_decode(coded_call(run, codes_only, nullptr), nullptr);
  const std::vector<uint8_t> codes = wanted.codes.download();
  const bool is_same = same_bits(codes, fused.codes.download()) && same_bits(codes, codes_only.codes.download()) &&
                       same_bits(wanted.scales.download(), fused.scales.download()) &&
                       same_bits(wanted.scales.download(), codes_only.scales.download()) &&
                       same_bits(out.download(), same_out.download());
  report.check(is_same && fused.codes.guard_is_whole() && fused.scales.guard_is_whole(),
               text("attention ", name, ": codes = those of a quantise behind it"));
}

struct LayerPool {
  explicit LayerPool(const PagedBatch& batch) : keys(batch.keys.size()), values(batch.values.size()) {
    GLINT_CHECK_CUDA(cudaMemcpy(keys.data(), batch.device_keys->data(), keys.bytes(), cudaMemcpyDeviceToDevice));
    GLINT_CHECK_CUDA(cudaMemcpy(values.data(), batch.device_values->data(), values.bytes(), cudaMemcpyDeviceToDevice));
  }
  PagePool pool(const Heads& heads) const {
    return {reinterpret_cast<std::byte*>(keys.data()), reinterpret_cast<std::byte*>(values.data()), heads.page_bytes(),
            heads.slab_bytes()};
  }
  void poison_slot(int64_t slot) {
    for (int slab = 0; slab < kDims / kSlabDims; ++slab) {
      const int64_t place = slot / kPageTokens * kPageTokens * kDims * 2 + slab * kSlabBytes +
                            slot % kPageTokens * kSlabRowBytes;
      for (uint16_t* slabs : {keys.data(), values.data()}) {
        GLINT_CHECK_CUDA(cudaMemset(slabs + place / 2, kPoisonByte, kSlabRowBytes));
      }
    }
  }

  DeviceArray<uint16_t> keys;
  DeviceArray<uint16_t> values;
};

class LayerChain {
 public:
  LayerChain(const Lengths& lengths, int num_layers, bool fills_all)
      : batch(Heads{}, lengths, 23, fills_all),
        run(batch, all_rows(batch)),
        random_(29),
        in_(random_.normals(as_size(batch.num_rows) * kInWidth, 1.0F)),
        norm_(random_.normals(kDims, 1.0F)),
        cosines_(random_.normals(as_size(batch.num_rows) * kRotary / 2, 1.0F)),
        sines_(random_.normals(as_size(batch.num_rows) * kRotary / 2, 1.0F)),
        slots_(new_slots(batch)),
        query_(batch.out_floats()) {
    for (int layer = 0; layer < num_layers; ++layer) pools.push_back(std::make_unique<LayerPool>(batch));
  }

  static std::vector<int32_t> new_slots(const PagedBatch& batch) {
    std::vector<int32_t> slots;
    for (const PagedRequest& request : batch.requests) {
      const int32_t position = request.first_position;
      slots.push_back(batch.table[as_size(request.page_first + position / kPageTokens)] * kPageTokens +
                      position % kPageTokens);
    }
    return slots;
  }

  void poison_new_slots() {
    const std::vector<int32_t> slots = new_slots(batch);
    for (const auto& pool : pools) {
      for (const int32_t slot : slots) pool->poison_slot(slot);
    }
  }

  void rotate(int layer, cudaStream_t stream) const {
    launch_rotate_and_store({.query_out = query_.data(),
                             .pages = pools[as_size(layer)]->pool(batch.heads),
                             .query = in_.data(),
                             .key = in_.data() + kWidth,
                             .value = in_.data() + kWidth + kDims,
                             .query_stride = kInWidth,
                             .key_stride = kInWidth,
                             .query_norm = norm_.data(),
                             .key_norm = norm_.data(),
                             .cosines = cosines_.data(),
                             .sines = sines_.data(),
                             .slots = slots_.data(),
                             .count = batch.num_rows,
                             .num_heads = kHeads,
                             .num_kv_heads = 1,
                             .head_dim = kDims,
                             .rotary_dim = kRotary,
                             .epsilon = 1e-5F},
                            stream);
  }

  void attend(int layer, DecodeCall call, cudaStream_t stream) const {
    call.attend.pages = pools[as_size(layer)]->pool(batch.heads);
    call.attend.query = query_.data();
    launch_attention_decode(call, stream);
  }

  PagedBatch batch;
  DecodeRun run;
  std::vector<std::unique_ptr<LayerPool>> pools;

 private:
  RandomSource random_;
  DeviceArray<float> in_;
  DeviceArray<float> norm_;
  DeviceArray<float> cosines_;
  DeviceArray<float> sines_;
  DeviceArray<int32_t> slots_;
  DeviceArray<uint16_t> query_;
};

void check_chain(Report& report, const std::string& name, const Lengths& lengths) {
  constexpr int kLayers = 8;
  constexpr int kTrials = 20;
  LayerChain chain(lengths, kLayers, false);
  DeviceArray<float> wanted(chain.batch.out_floats());
  DeviceArray<float> out(chain.batch.out_floats() * kLayers);
  CodeRows rows(chain.batch.num_rows, kWidth);
  cudaStream_t stream;
  GLINT_CHECK_CUDA(cudaStreamCreate(&stream));
  chain.rotate(0, stream);
  GLINT_CHECK_CUDA(cudaStreamSynchronize(stream));
  chain.attend(0, chain.run.call(wanted.data()), stream);
  GLINT_CHECK_CUDA(cudaStreamSynchronize(stream));
  int64_t different = 0;
  for (int trial = 0; trial < (is_quick ? 2 : kTrials); ++trial) {
    chain.poison_new_slots();
    GLINT_CHECK_CUDA(cudaDeviceSynchronize());
    for (int layer = 0; layer < kLayers; ++layer) {
      chain.rotate(layer, stream);
      chain.attend(layer, coded_call(chain.run, rows, out.data() + as_size(layer) * wanted.count()), stream);
    }
    GLINT_CHECK_CUDA(cudaStreamSynchronize(stream));
    for (int layer = 0; layer < kLayers; ++layer) {
      different += count_differences(out.data() + as_size(layer) * wanted.count(), wanted.data(), wanted.bytes());
    }
  }
  GLINT_CHECK_CUDA(cudaStreamDestroy(stream));
  report.check(different == 0, text("attention right behind the page write, ", name), text(different, " bytes differ"));
}

enum class Measured { kAttention, kChainWithQuantise, kChainWithCodes };

void time_layers(const Ceiling& ceiling, int32_t requests, int32_t context, Measured measured) {
  constexpr double kSetBytes = 2e8;
  const double bytes = static_cast<double>(requests) * context * 512;
  const int layers = std::clamp(static_cast<int>(kSetBytes / bytes) + 1, 1, 40);
  const LayerChain chain(Lengths(as_size(requests), {context - 1, 1}), layers, true);
  DeviceArray<float> out(chain.batch.out_floats());
  const CodeRows rows(requests, kWidth);
  const bool has_codes = measured == Measured::kChainWithCodes;
  const double seconds = median_seconds(
      [&](int layer, cudaStream_t stream) {
        if (measured != Measured::kAttention) chain.rotate(layer, stream);
        chain.attend(layer, has_codes ? coded_call(chain.run, rows, nullptr) : chain.run.call(out.data()), stream);
        if (measured == Measured::kChainWithQuantise) quantise_apart(rows, out.data(), requests, stream);
      },
      layers);
  const char* name = measured == Measured::kAttention ? "attention decode "
                     : has_codes                      ? "page write, attention with codes "
                                                      : "page write, attention, quantise ";
  print_time(text(name, requests, "x", context), seconds, {.bytes = bytes}, ceiling);
}

}

void run_decode(Report& report, const Ceiling& ceiling) {
  check_codes(report, "short", {{0, 1}, {16, 1}, {63, 1}, {64, 2}, {511, 1}, {1000, 30}}, kWidth);
  check_codes(report, "long", {{1023, 1}, {1024, 1}, {2500, 7}, {5000, 3}}, kWidth + 16);
  check_codes(report, "many", {{100, 90}, {1500, 60}}, kWidth);
  check_chain(report, "64 requests", Lengths(64, {447, 1}));
  check_chain(report, "few of many lengths", {{0, 1}, {64, 1}, {127, 1}, {128, 1}, {255, 1}, {256, 1}, {3000, 1}});
  check_chain(report, "200 requests", Lengths(200, {192, 1}));
  for (const auto& [requests, context] :
       Lengths{{1, 128}, {1, 512}, {8, 512}, {64, 512}, {256, 512}, {1, 8192}, {1, 32768}, {64, 4096}, {256, 4096}}) {
    time_layers(ceiling, requests, context, Measured::kAttention);
  }
  for (const auto& [requests, context] : Lengths{{1, 512}, {8, 512}, {64, 512}, {256, 512}, {64, 4096}}) {
    time_layers(ceiling, requests, context, Measured::kChainWithQuantise);
    time_layers(ceiling, requests, context, Measured::kChainWithCodes);
  }
}

}
