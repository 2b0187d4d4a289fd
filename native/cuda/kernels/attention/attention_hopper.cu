#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/attention/attention_prefill_hopper.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

void launch_attention_prefill_hopper(const PrefillCall& call, cudaStream_t stream) {
  require_argument(call.attend.head_dim == hopper::kHeadDim, "head_dim is ", call.attend.head_dim,
                   "; the Hopper prefill kernel is built for ", hopper::kHeadDim);
  start_persistent<hopper::SharedPlan>(hopper::attention_prefill_hopper_kernel, call, hopper::kThreads, stream);
}

}
