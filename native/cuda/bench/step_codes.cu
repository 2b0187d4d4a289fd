#include "cuda/bench/step_pages.h"

namespace glint::cuda::bench {

namespace {

constexpr uint8_t kNanCode = 0x7f;

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

uint8_t code_of(uint16_t value) { return e4m3_from_float(float_from_bf16(value)); }

void round_to_codes(std::vector<uint16_t>& slabs) {
  for (uint16_t& value : slabs) {
    if (!std::isnan(float_from_bf16(value))) value = bf16_from_float(float_from_e4m3(code_of(value)));
  }
}

std::vector<uint8_t> codes_of(const std::vector<uint16_t>& slabs, int padded_dim) {
  std::vector<uint8_t> codes(slabs.size(), kNanCode);
  const size_t slab_elements = as_size(int64_t{kPageTokens} * padded_dim);
  for (size_t first = 0; first < slabs.size(); first += slab_elements) {
    for (int row = 0; row < kPageTokens; ++row) {
      for (int dim = 0; dim < padded_dim; ++dim) {
        codes[first + as_size(fp8_offset(padded_dim, row, dim))] =
            code_of(slabs[first + as_size(swizzled_offset(row, dim)) / 2]);
      }
    }
  }
  return codes;
}

class CodedBatch {
 public:
  CodedBatch(const Heads& heads, const Lengths& lengths, uint64_t seed, bool fills_all)
      : batch(heads, lengths, seed, fills_all) {
    round_to_codes(batch.keys);
    round_to_codes(batch.values);
    upload();
  }

  void upload() {
    batch.upload_pages();
    keys = std::make_unique<DeviceArray<uint8_t>>(codes_of(batch.keys, batch.heads.padded_dim()));
    values = std::make_unique<DeviceArray<uint8_t>>(codes_of(batch.values, batch.heads.padded_dim()));
    widened_keys = std::make_unique<DeviceArray<uint16_t>>(batch.keys.size());
    widened_values = std::make_unique<DeviceArray<uint16_t>>(batch.values.size());
  }

  KvPages codes() const {
    return {reinterpret_cast<std::byte*>(keys->data()), reinterpret_cast<std::byte*>(values->data()),
            batch.heads.page_bytes() / 2, batch.heads.slab_bytes() / 2, PageElement::kE4m3};
  }
  KvPages widened() const {
    return {reinterpret_cast<std::byte*>(widened_keys->data()), reinterpret_cast<std::byte*>(widened_values->data()),
            batch.heads.page_bytes(), batch.heads.slab_bytes()};
  }
  DequantiseKvCall widen() const {
    return {codes(), widened(), batch.device_table->data(), static_cast<int64_t>(batch.table.size()),
            batch.heads.num_kv_heads, batch.heads.head_dim};
  }

  PagedBatch batch;
  std::unique_ptr<DeviceArray<uint8_t>> keys;
  std::unique_ptr<DeviceArray<uint8_t>> values;
  std::unique_ptr<DeviceArray<uint16_t>> widened_keys;
  std::unique_ptr<DeviceArray<uint16_t>> widened_values;
};

struct Outputs {
  std::vector<float> decoded;
  std::vector<float> prefilled;
  std::vector<float> portable;
};

Outputs run_all(const PagedBatch& batch, const KvPages& decode_pool, const KvPages& prefill_pool) {
  const DecodeRun decode(batch, all_rows(batch));
  const PrefillRun prefill(batch);
  const DeviceArray<float> decoded(batch.out_floats());
  const DeviceArray<float> prefilled(batch.out_floats());
  const DeviceArray<float> portable(batch.out_floats());
  DecodeCall decode_call = decode.call(decoded.data());
  decode_call.attend.pages = decode_pool;
  launch_attention_decode(decode_call, nullptr);
  PrefillCall prefill_call = prefill.call(prefilled.data());
  prefill_call.attend.pages = prefill_pool;
  launch_attention_prefill(prefill_call, nullptr);
  prefill_call.attend.out = portable.data();
  launch_attention_prefill_portable(prefill_call, nullptr);
  return {decoded.download(), prefilled.download(), portable.download()};
}

bool same_values(const std::vector<float>& left, const std::vector<float>& right) {
  return std::ranges::equal(left, right, [](float one, float other) {
    return (std::isnan(one) && std::isnan(other)) || std::bit_cast<uint32_t>(one) == std::bit_cast<uint32_t>(other);
  });
}

void check_coded(Report& report, const Heads& heads, const Lengths& lengths, int32_t spoiled_position) {
  CodedBatch coded(heads, lengths, 5 + lengths.size(), false);
  PagedBatch& batch = coded.batch;
  if (spoiled_position >= 0) {
    batch.spoil(0, spoiled_position, spoiled_position + 1, false);
    coded.upload();
  }
  launch_dequantise_kv(coded.widen(), nullptr);
  const Outputs wanted = run_all(batch, batch.pool(), batch.pool());
  const Outputs found = run_all(batch, coded.codes(), coded.widened());
  const auto num_nan = std::ranges::count_if(found.decoded, [](float value) { return std::isnan(value); });
  report.check(same_values(wanted.decoded, found.decoded) && same_values(wanted.prefilled, found.prefilled) &&
                   same_values(wanted.portable, found.portable) && same_values(found.decoded, found.prefilled) &&
                   (num_nan > 0) == (spoiled_position >= 0),
               text("E4M3 pages = BF16 pages of the same numbers, ", heads.num_heads, " heads over ",
                    heads.num_kv_heads, " of ", heads.head_dim, spoiled_position < 0 ? "" : ", one position NaN"),
               text(num_nan, " of ", found.decoded.size(), " NaN"));
}

void check_every_code(Report& report) {
  CodedBatch coded({}, {{127, 1}}, 3, true);
  std::vector<uint8_t> codes(coded.batch.keys.size());
  for (size_t place = 0; place < codes.size(); ++place) {
    codes[place] = static_cast<uint8_t>(place / 16 + place % 16 * 37);
    if ((codes[place] & kNanCode) == kNanCode) codes[place] = 0x80;
  }
  coded.keys->upload(codes);
  launch_dequantise_kv(coded.widen(), nullptr);
  const std::vector<uint16_t> widened = coded.widened_keys->download();
  int64_t num_wrong = 0;
  std::vector<bool> is_seen(256);
  const size_t slab_elements = as_size(int64_t{kPageTokens} * kMaxHeadDim);
  for (size_t first = 0; first < codes.size(); first += slab_elements) {
    for (int row = 0; row < kPageTokens; ++row) {
      for (int dim = 0; dim < kMaxHeadDim; ++dim) {
        const uint8_t code = codes[first + as_size(fp8_offset(kMaxHeadDim, row, dim))];
        is_seen[code] = true;
        const uint16_t found = widened[first + as_size(swizzled_offset(row, dim)) / 2];
        num_wrong += found == bf16_from_float(float_from_e4m3(code)) ? 0 : 1;
      }
    }
  }
  report.check(num_wrong == 0 && std::ranges::count(is_seen, true) == 254, "every E4M3 code is widened exactly",
               text(num_wrong, " wrong, ", std::ranges::count(is_seen, true), " codes"));
}

void time_decode(const Ceiling& ceiling, int32_t requests, int32_t context) {
  constexpr int kSets = 2;
  const Lengths lengths(as_size(requests), {context - 1, 1});
  std::vector<std::unique_ptr<CodedBatch>> sets;
  for (int set = 0; set < kSets; ++set) {
    sets.push_back(std::make_unique<CodedBatch>(Heads{}, lengths, as_size(set) + 1, true));
  }
  const DecodeRun run(sets[0]->batch, all_rows(sets[0]->batch));
  DeviceArray<float> out(sets[0]->batch.out_floats());
  for (const bool has_codes : {false, true}) {
    const double seconds = median_seconds(
        [&](int set, cudaStream_t stream) {
          DecodeCall call = run.call(out.data());
          call.attend.pages = has_codes ? sets[as_size(set)]->codes() : sets[as_size(set)]->batch.pool();
          launch_attention_decode(call, stream);
        },
        kSets);
    const double bytes = static_cast<double>(requests) * context * (has_codes ? 256 : 512);
    print_time(text("attention decode ", requests, " requests of ", context, has_codes ? ", E4M3" : ", BF16"), seconds,
               {.bytes = bytes}, ceiling);
  }
}

void time_prefill(const Ceiling& ceiling, int32_t cached, int32_t fresh) {
  const CodedBatch coded({}, {{cached, fresh}}, 3, true);
  const PrefillRun run(coded.batch);
  DeviceArray<float> out(coded.batch.out_floats());
  const double pairs = static_cast<double>(fresh) * cached + static_cast<double>(fresh) * (fresh + 1) / 2;
  for (const bool has_codes : {false, true}) {
    const double seconds = median_seconds(
        [&](int, cudaStream_t stream) {
          PrefillCall call = run.call(out.data());
          if (has_codes) {
            launch_dequantise_kv(coded.widen(), stream);
            call.attend.pages = coded.widened();
          }
          launch_attention_prefill(call, stream);
        },
        1);
    print_time(text("attention prefill ", fresh, " over ", cached, has_codes ? ", E4M3 widened" : ", BF16"), seconds,
               {.operations = pairs * 12 * 128 * 4}, ceiling);
  }
}

}

void run_codes(Report& report, const Ceiling& ceiling) {
  const Lengths lengths = {{0, 1}, {63, 2}, {64, 65}, {900, 150}, {2047, 17}, {1023, 1}, {5000, 3}, {130, 33}};
  check_every_code(report);
  for (const Heads& heads : {Heads{}, Heads{6, 2, 64}, Heads{9, 3, 48}, Heads{8, 2, 96}, Heads{16, 1, 128}}) {
    check_coded(report, heads, lengths, -1);
    check_coded(report, heads, {{100, 90}, {0, 1}}, 150);
  }
  if (is_quick) return;
  time_decode(ceiling, 1, 4096);
  time_decode(ceiling, 64, 512);
  time_decode(ceiling, 64, 4096);
  time_prefill(ceiling, 0, 4096);
  time_prefill(ceiling, 28672, 4096);
}

}
