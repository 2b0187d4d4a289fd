#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/fp8.h"
#include "cpu/operations.h"

namespace glint {

namespace cpu {

void embed(Workers& workers, float* hidden, const Weight& table, std::span<const int32_t> tokens) {
  workers.team().run(static_cast<int64_t>(tokens.size()), [&](int64_t row, int) {
    const std::byte* source = table.row(tokens[static_cast<size_t>(row)]);
    for (int64_t index = 0; index < table.cols; ++index) {
      uint16_t bits = 0;
      std::memcpy(&bits, source + 2 * index, sizeof(bits));
      hidden[row * table.cols + index] = float_from_bf16(bits);
    }
  });
}

void rms_norm(Workers& workers, float* out, const float* in, const float* weight, int64_t count, int64_t width,
              double epsilon) {
  const RowKernels& kernels = workers.kernels().rows;
  workers.team().run(count, [&](int64_t row, int) {
    kernels.norm(out + row * width, in + row * width, weight, width, epsilon);
  });
}

void add_rows(Workers& workers, float* hidden, const float* update, int64_t count) {
  constexpr int64_t kChunk = 8192;
  workers.team().run((count + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
    const int64_t end = std::min(count, (chunk + 1) * kChunk);
    for (int64_t index = chunk * kChunk; index < end; ++index) hidden[index] += update[index];
  });
}

void reduce_slices(Workers& workers, float* parts, int64_t part_stride, int32_t num_parts, int64_t count) {
  for (int32_t width = 1; width < num_parts; width *= 2) {
    for (int32_t part = 0; part + width < num_parts; part += 2 * width) {
      add_rows(workers, parts + part * part_stride, parts + (part + width) * part_stride, count);
    }
  }
}

void gather_rows(Workers& workers, float* out, const float* in, std::span<const int32_t> rows, int64_t width) {
  workers.team().run(static_cast<int64_t>(rows.size()), [&](int64_t row, int) {
    const float* source = in + rows[static_cast<size_t>(row)] * width;
    std::copy(source, source + width, out + row * width);
  });
}

}

}
