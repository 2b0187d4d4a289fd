#pragma once

namespace glint::cuda::bench {

bool check_experts();
void measure_experts(double ceiling);

}
