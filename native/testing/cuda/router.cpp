#include "cuda/kernels/router/router.h"
#include "testing/cuda/grouping.h"

namespace {

using glint::testing::DeviceArray;
using glint::testing::Grouping;
using glint::testing::guarded;
using glint::testing::Runner;
using glint::testing::TestGrouping;

struct TestRoute {
  int32_t* experts;
  float* weights;
  const float* in;
  const uint16_t* weight;
  const float* bias;
  int64_t count;
  int64_t width;
  const glint_model* model;
};

struct DeviceRoute {
  explicit DeviceRoute(const TestRoute& source)
      : test(source),
        experts(source.count * source.model->experts_per_token),
        weights(source.count * source.model->experts_per_token),
        splits(glint::cuda::router_split_floats(source.count, source.width, source.model->num_experts)),
        in(source.in, source.count * source.width),
        weight(source.weight, source.model->num_experts * source.width),
        bias(source.bias, source.model->num_experts) {}

  glint::cuda::RouterCall call(int64_t count) const {
    const glint_model& model = *test.model;
    return {.experts = experts.data(),
            .weights = weights.data(),
            .splits = splits.data(),
            .in = in.data(),
            .weight = weight.data(),
            .bias = bias.data(),
            .count = count,
            .width = static_cast<int32_t>(test.width),
            .num_experts = model.num_experts,
            .experts_per_token = model.experts_per_token,
            .routed_scaling = model.routed_scaling,
            .normalises = model.normalise_weights != 0};
  }

  void launch(int64_t count) const { glint::cuda::launch_router(call(count), nullptr); }

  void launch_and_group(const Grouping& grouping) const {
    glint::cuda::GroupCall group = grouping.call(test.count);
    group.experts = experts.data();
    group.weights = weights.data();
    glint::cuda::launch_router_and_grouping(call(test.count), group, nullptr);
  }

  void download() const {
    experts.download(test.experts);
    weights.download(test.weights);
  }

  const TestRoute& test;
  DeviceArray<int32_t> experts;
  DeviceArray<float> weights;
  DeviceArray<float> splits;
  DeviceArray<float> in;
  DeviceArray<uint16_t> weight;
  DeviceArray<float> bias;
};

}

extern "C" {

GLINT_API int32_t glint_testing_route(Runner* runner, const TestRoute* test) {
  return guarded([&] {
    const DeviceRoute route(*test);
    runner->run([&] { route.launch(test->count); }, {&route.experts, &route.weights});
    route.download();
  });
}

GLINT_API int32_t glint_testing_route_and_group(Runner* runner, const TestRoute* test, const TestGrouping* groups) {
  return guarded([&] {
    const DeviceRoute route(*test);
    const Grouping grouping(*groups);
    grouping.run(*runner, [&] { route.launch_and_group(grouping); });
    route.download();
    grouping.download();
  });
}

GLINT_API int32_t glint_testing_route_row_counts(Runner* runner, const TestRoute* test) {
  return guarded([&] {
    const DeviceRoute route(*test);
    runner->run_row_counts([&](int64_t count) { route.launch(count); }, route.weights, test->count);
  });
}
}
