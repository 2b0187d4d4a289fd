#pragma once

#include <cstdint>

namespace glint {

double sum_of_squares(const float* values, int64_t count);
void norm_row(float* out, const float* in, const float* weight, int64_t width, double epsilon);

}
