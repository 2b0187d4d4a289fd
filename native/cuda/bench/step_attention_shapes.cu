#include "cuda/bench/step_pages.h"

namespace glint::cuda::bench {

namespace {

constexpr int kPoisonThreads = 256;

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

__global__ void poison_shared_kernel(uint32_t* g_sink, int num_words) {
  extern __shared__ uint32_t s_words[];
  for (int word = static_cast<int>(threadIdx.x); word < num_words; word += kPoisonThreads) s_words[word] = ~0U;
  __syncthreads();
  if (s_words[num_words - 1 - static_cast<int>(threadIdx.x)] == 0) *g_sink = 0;
}

void poison_shared_memory() {
  constexpr int kBytes = 227 * 1024;
  constexpr unsigned kThreadBlocks = 132 * 4;
  const DeviceArray<uint32_t> sink(1);
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(poison_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  poison_shared_kernel<<<kThreadBlocks, kPoisonThreads, kBytes>>>(sink.data(), kBytes / 4);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

struct Outputs {
  std::vector<float> decoded;
  std::vector<float> prefilled;
  std::vector<float> portable;
  bool guards_are_whole = false;
};

Outputs run_all(const PagedBatch& batch) {
  const DecodeRun decode(batch, all_rows(batch));
  const PrefillRun prefill(batch);
  const DeviceArray<float> decoded(batch.out_floats());
  const DeviceArray<float> prefilled(batch.out_floats());
  const DeviceArray<float> portable(batch.out_floats());
  poison_shared_memory();
  launch_attention_decode(decode.call(decoded.data()), nullptr);
  poison_shared_memory();
  launch_attention_prefill(prefill.call(prefilled.data()), nullptr);
  poison_shared_memory();
  launch_attention_prefill_portable(prefill.call(portable.data()), nullptr);
  return {decoded.download(), prefilled.download(), portable.download(),
          decoded.guard_is_whole() && prefilled.guard_is_whole() && portable.guard_is_whole()};
}

std::vector<int32_t> reference_rows(const PagedBatch& batch) {
  constexpr size_t kMaxRequests = 6;
  const size_t stride = (batch.requests.size() + kMaxRequests - 1) / kMaxRequests;
  std::vector<int32_t> rows;
  for (size_t index = 0; index < batch.requests.size(); index += stride) {
    const PagedRequest& request = batch.requests[index];
    rows.push_back(request.row_first);
    if (request.row_count > 1) rows.push_back(request.row_first + request.row_count - 1);
  }
  return rows;
}

bool is_same_alone(const PagedBatch& batch, int32_t row, const std::vector<float>& out) {
  const DecodeRun alone(batch, {row});
  const DeviceArray<float> alone_out(batch.out_floats());
  launch_attention_decode(alone.call(alone_out.data()), nullptr);
  const std::vector<float> row_out = alone_out.download();
  const size_t width = as_size(batch.heads.num_heads * batch.heads.head_dim);
  const size_t first = as_size(row) * width;
  return std::memcmp(row_out.data() + first, out.data() + first, width * sizeof(float)) == 0;
}

void check_batch(Report& report, const std::string& what, const Heads& heads, const Lengths& lengths) {
  const PagedBatch batch(heads, lengths, 77 + lengths.size());
  const std::string name = text("attention ", what, ", ", heads.num_heads, " heads over ", heads.num_kv_heads, " of ",
                                heads.head_dim);
  const std::vector<int32_t> rows = reference_rows(batch);
  const Outputs out = run_all(batch);
  const double error = worst_error(batch, out.decoded, rows, false);
  const double close_error = worst_error(batch, out.decoded, rows, true);
  const bool is_complete = std::ranges::none_of(out.decoded, [](float value) { return std::isnan(value); });
  report.check(error < 6e-3 && close_error < 3e-4 && is_complete && out.guards_are_whole, text(name, " = FP64"),
               text("error ", error, ", against the same weight rounding ", close_error));
  report.check(same_bits(out.decoded, out.prefilled) && same_bits(out.decoded, out.portable) &&
                   is_same_alone(batch, rows.back(), out.decoded),
               text(name, ": decode = prefill = portable prefill = alone, bit by bit"));
}

int64_t count_wrong_rows(const PagedBatch& batch, const Outputs& before, const Outputs& after,
                         const std::function<bool(int32_t)>& sees_nan) {
  const size_t width = as_size(batch.heads.num_heads * batch.heads.head_dim);
  int64_t num_wrong = 0;
  for (const auto outputs : {&Outputs::decoded, &Outputs::prefilled, &Outputs::portable}) {
    for (int32_t row = 0; row < batch.num_rows; ++row) {
      const float* wanted = (before.*outputs).data() + as_size(row) * width;
      const float* found = (after.*outputs).data() + as_size(row) * width;
      const bool holds = sees_nan(row)
                             ? std::all_of(found, found + width, [](float value) { return std::isnan(value); })
                             : std::memcmp(wanted, found, width * sizeof(float)) == 0;
      num_wrong += holds ? 0 : 1;
    }
  }
  return num_wrong;
}

void check_spoiled_requests(Report& report, const Heads& heads) {
  constexpr int32_t kRequests = 700;
  Lengths lengths;
  for (int32_t index = 0; index < kRequests; ++index) lengths.emplace_back(index * 7 % 90, 1 + index % 2 * 12);
  PagedBatch batch(heads, lengths, 9);
  const Outputs before = run_all(batch);
  for (int32_t request = 0; request < kRequests; request += 3) {
    batch.spoil(request, 0, batch.requests[as_size(request)].num_positions(), true);
  }
  batch.upload_pages();
  const int64_t num_wrong = count_wrong_rows(batch, before, run_all(batch),
                                             [&](int32_t row) { return batch.request_of(row) % 3 == 0; });
  report.check(num_wrong == 0, text("attention over ", heads.head_dim, ": NaN in every third request stays there"),
               text(num_wrong, " of ", 3 * batch.num_rows, " rows wrong"));
}

void check_spoiled_position(Report& report, const Heads& heads) {
  constexpr int32_t kSpoiled = 150;
  PagedBatch batch(heads, {{100, 90}, {0, 1}}, 10);
  const Outputs before = run_all(batch);
  batch.spoil(0, kSpoiled, kSpoiled + 1, false);
  batch.upload_pages();
  const int64_t num_wrong = count_wrong_rows(batch, before, run_all(batch),
                                             [](int32_t row) { return row >= 50 && row < 90; });
  report.check(num_wrong == 0, text("attention over ", heads.head_dim, ": a position of NaN stays out of earlier rows"),
               text(num_wrong, " of ", 3 * batch.num_rows, " rows wrong"));
}

void check_refusal(Report& report, const Heads& heads) {
  const PagedBatch batch({}, {{0, 1}}, 1);
  AttendCall attend = batch.attend(nullptr);
  attend.num_heads = heads.num_heads;
  attend.num_kv_heads = heads.num_kv_heads;
  attend.head_dim = heads.head_dim;
  std::string message;
  try {
    launch_attention_prefill({.attend = attend, .tasks = nullptr, .num_tasks = nullptr}, nullptr);
  } catch (const Failure& failure) {
    message = failure.what();
  }
  report.check(!message.empty(), text("attention refuses ", heads.num_heads, " heads over ", heads.num_kv_heads, " of ",
                                      heads.head_dim),
               message);
}

void check_lengths(Report& report, const Heads& heads) {
  Lengths lengths;
  for (int32_t cached = 0; cached < 5000; cached += 131) lengths.emplace_back(cached, 1);
  for (int32_t cached = 0; cached < 200; cached += 13) lengths.emplace_back(cached, 9 + cached % 40);
  check_batch(report, "contexts of 1 to 5,000", heads, lengths);
}

}

void check_attention_shapes(Report& report) {
  constexpr int32_t kHeadDims[] = {128, 64, 32, 96, 16, 48, 126, 2};
  check_batch(report, "short", {}, {{0, 1}, {16, 1}, {63, 1}, {64, 2}, {511, 1}, {1000, 30}});
  check_batch(report, "long", {}, {{1023, 1}, {1024, 1}, {2500, 60}, {5000, 3}});
  for (int32_t group = 1; group <= kMaxGroupHeads; ++group) {
    const int32_t num_kv_heads = 1 + group % 3;
    const int32_t first = 37 * group;
    check_batch(report, "chunks", {group * num_kv_heads, num_kv_heads, kHeadDims[group % 8]},
                {{0, 1}, {0, group + 20}, {first, 40}, {63, 2}, {64, 65}, {first + 900, 150}, {2047, 17}});
  }
  for (const Heads& heads : {Heads{6, 2, 64}, Heads{6, 2, 32}, Heads{6, 3, 32}, Heads{8, 2, 16}, Heads{}}) {
    check_lengths(report, heads);
  }
  for (const Heads& heads : {Heads{6, 2, 32}, Heads{6, 2, 64}, Heads{}}) {
    check_spoiled_requests(report, heads);
    check_spoiled_position(report, heads);
  }
  for (const Heads& heads : {Heads{6, 2, 33}, Heads{6, 2, 130}, Heads{17, 1, 64}, Heads{5, 2, 64}}) {
    check_refusal(report, heads);
  }
}

}
