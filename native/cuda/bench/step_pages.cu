#include "cuda/bench/step_pages.h"

namespace glint::cuda::bench {

namespace {

constexpr uint16_t kPoison = 0xffff;

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

}

PagedBatch::PagedBatch(const Heads& heads_given, const Lengths& lengths, uint64_t seed, bool fills_all)
    : heads(heads_given) {
  RandomSource random(seed);
  int32_t num_pages = 0;
  for (const auto& [cached, fresh] : lengths) {
    requests.push_back({num_rows, fresh, cached, num_pages});
    num_rows += fresh;
    num_pages += (cached + fresh + kPageTokens - 1) / kPageTokens;
  }
  for (int32_t page = 0; page < num_pages; ++page) table.push_back(page);
  for (int32_t page = num_pages - 1; page > 0; --page) {
    std::swap(table[as_size(page)], table[as_size(random.below(page + 1))]);
  }
  keys.assign(as_size(num_pages * heads.page_bytes() / 2), kPoison);
  values = keys;
  fills_all ? fill_all(random) : fill_positions(random);
  const auto padded = as_size(heads.padded_dim());
  query.resize(as_size(num_rows * heads.num_heads) * padded);
  for (size_t index = 0; index < query.size(); ++index) {
    const bool is_padding = index % padded >= as_size(heads.head_dim);
    query[index] = is_padding ? uint16_t{0} : bf16_from_float(1.5F * random.normal());
  }
  device_table = std::make_unique<DeviceArray<int32_t>>(table);
  device_keys = std::make_unique<DeviceArray<uint16_t>>(keys);
  device_values = std::make_unique<DeviceArray<uint16_t>>(values);
  device_query = std::make_unique<DeviceArray<uint16_t>>(query);
}

void PagedBatch::fill_all(RandomSource& random) {
  for (uint16_t& value : keys) value = bf16_from_float(random.normal());
  for (uint16_t& value : values) value = bf16_from_float(random.normal());
}

void PagedBatch::fill_positions(RandomSource& random) {
  for (size_t index = 0; index < requests.size(); ++index) {
    const auto request = static_cast<int32_t>(index);
    for (int64_t position = 0; position < requests[index].num_positions(); ++position) {
      for (int32_t kv_head = 0; kv_head < heads.num_kv_heads; ++kv_head) {
        for (int32_t dim = 0; dim < heads.head_dim; ++dim) {
          const size_t place = element(request, position, kv_head, dim);
          const uint64_t bits = random.bits();
          const auto near = [](uint64_t part) { return static_cast<float>(part & 0xffffU) / 32768.0F - 1.0F; };
          keys[place] = bf16_from_float(2.0F * (near(bits) + near(bits >> 16U)));
          values[place] = bf16_from_float(near(bits >> 32U) + near(bits >> 48U));
        }
        for (int32_t dim = heads.head_dim; dim < heads.padded_dim(); ++dim) {
          const size_t place = element(request, position, kv_head, dim);
          keys[place] = values[place] = 0;
        }
      }
    }
  }
}

size_t PagedBatch::element(int32_t request, int64_t position, int kv_head, int dim) const {
  const int64_t page = table[as_size(requests[as_size(request)].page_first + position / kPageTokens)];
  const int64_t slab = page * heads.page_bytes() + kv_head * heads.slab_bytes();
  return as_size((slab + swizzled_offset(static_cast<int>(position % kPageTokens), dim)) / 2);
}

int32_t PagedBatch::request_of(int32_t row) const {
  int32_t found = 0;
  while (row >= requests[as_size(found)].row_first + requests[as_size(found)].row_count) ++found;
  return found;
}

void PagedBatch::spoil(int32_t request, int32_t first_position, int32_t last_position, bool spoils_values) {
  for (int32_t position = first_position; position < last_position; ++position) {
    for (int32_t kv_head = 0; kv_head < heads.num_kv_heads; ++kv_head) {
      for (int32_t dim = 0; dim < heads.padded_dim(); ++dim) {
        const size_t place = element(request, position, kv_head, dim);
        keys[place] = kPoison;
        values[place] = spoils_values ? kPoison : uint16_t{0};
      }
    }
  }
}

void PagedBatch::upload_pages() {
  device_keys->upload(keys);
  device_values->upload(values);
}

std::vector<DecodeTask> PagedBatch::decode_tasks(const std::vector<int32_t>& rows) const {
  std::vector<DecodeTask> tasks;
  int32_t num_partials = 0;
  for (const int32_t row : rows) {
    const PagedRequest& request = requests[as_size(request_of(row))];
    const int32_t positions = request.first_position + row - request.row_first + 1;
    const int32_t splits = num_context_splits(positions);
    const int32_t tails = num_context_tails(positions);
    for (int32_t split = 0; split < splits - tails; ++split) {
      const int32_t own_tails = split + 1 + tails == splits ? tails : 0;
      DecodeTask task{row, positions, split, splits, num_partials, own_tails, {}};
      const int32_t page_count = (positions + kPageTokens - 1) / kPageTokens;
      const int32_t most_pages = kSplitPages + own_tails * kTailPages;
      for (int32_t page = 0; page < most_pages && split * kSplitPages + page < page_count; ++page) {
        task.pages[page] = table[as_size(request.page_first + split * kSplitPages + page)];
      }
      tasks.push_back(task);
    }
    num_partials += splits;
  }
  return tasks;
}

std::vector<PrefillTask> PagedBatch::prefill_tasks() const {
  std::vector<PrefillTask> tasks;
  for (const PagedRequest& request : requests) {
    const int32_t queries = request.row_count * heads.group_heads();
    for (int32_t first = 0; first < queries; first += kPrefillTileQueries) {
      tasks.push_back({request.row_first, request.row_count, request.first_position, request.page_first, first});
    }
  }
  std::ranges::stable_sort(tasks, [&](const PrefillTask& left, const PrefillTask& right) {
    return left.first_position + left.query_first / heads.group_heads() >
           right.first_position + right.query_first / heads.group_heads();
  });
  return tasks;
}

std::vector<int32_t> all_rows(const PagedBatch& batch) {
  std::vector<int32_t> rows;
  for (int32_t row = 0; row < batch.num_rows; ++row) rows.push_back(row);
  return rows;
}

DecodeRun::DecodeRun(const PagedBatch& batch, const std::vector<int32_t>& rows)
    : batch_(batch),
      tasks_(batch.decode_tasks(rows)),
      device_tasks_(tasks_),
      num_tasks_(std::vector<int32_t>{static_cast<int32_t>(tasks_.size())}),
      partials_(2 * tasks_.size() * as_size(batch.heads.num_kv_heads * partial_floats(batch.heads.head_dim))),
      arrivals_(std::vector<int32_t>(as_size(batch.num_rows * batch.heads.num_kv_heads), 0)) {}

DecodeCall DecodeRun::call(float* out) const {
  return {.attend = batch_.attend(out),
          .tasks = device_tasks_.data(),
          .num_tasks = num_tasks_.data(),
          .max_tasks = static_cast<int32_t>(tasks_.size()),
          .partials = partials_.data(),
          .arrivals = arrivals_.data()};
}

PrefillRun::PrefillRun(const PagedBatch& batch)
    : batch_(batch),
      tasks_(batch.prefill_tasks()),
      device_tasks_(tasks_),
      num_tasks_(std::vector<int32_t>{static_cast<int32_t>(tasks_.size())}) {}

PrefillCall PrefillRun::call(float* out) const {
  return {.attend = batch_.attend(out), .tasks = device_tasks_.data(), .num_tasks = num_tasks_.data()};
}

}
