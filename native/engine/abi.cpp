#include <mutex>
#include <new>
#include <set>
#include <string>
#include <system_error>

#include "base/contract.h"
#include "engine/engine.h"
#include "engine/engine.h"
#include "model/load_progress.h"

namespace {

thread_local std::string last_error;

std::mutex live_mutex;
std::set<const glint_engine*>& live_engines() {
  static std::set<const glint_engine*> engines;
  return engines;
}

glint_status failed(glint_status status, const char* words) noexcept {
  try {
    last_error = words;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

template <typename Action>
glint_status guarded(Action&& action) {
  try {
    last_error.clear();
    action();
    return GLINT_STATUS_OK;
  } catch (const glint::Failure& failure) {
    return failed(failure.status(), failure.what());
  } catch (const std::bad_alloc&) {
    return failed(GLINT_STATUS_OUT_OF_MEMORY, "the machine is out of memory");
  } catch (const std::system_error& failure) {
    return failed(GLINT_STATUS_OUT_OF_MEMORY, failure.what());
  } catch (const std::exception& failure) {
    return failed(GLINT_STATUS_INTERNAL, failure.what());
  } catch (...) {
    return failed(GLINT_STATUS_INTERNAL, "an unknown failure");
  }
}

}

std::shared_ptr<glint::Engine> glint::engine_of(glint_engine* handle) {
  const std::lock_guard lock(live_mutex);
  require_argument(handle != nullptr, "the engine is null");
  require_argument(live_engines().contains(handle), "the engine handle is not one of a living engine");
  return handle->engine;
}

using glint::engine_of;
using glint::require_argument;
using glint::require_struct;

uint32_t glint_abi_version(void) { return GLINT_ABI_VERSION; }

const char* glint_backend_name(void) { return glint::backend_name(); }

const char* glint_last_error(void) { return last_error.c_str(); }

glint_status glint_describe_device(int32_t index, int32_t kernels, glint_device* device) {
  return guarded([&] {
    require_struct(device, "device");
    *device = glint::describe_backend_device(index, kernels);
  });
}

glint_status glint_plan_engine(const glint_engine_options* options, glint_engine_plan* plan) {
  return guarded([&] {
    require_struct(options, "options");
    require_struct(plan, "plan");
    *plan = glint::plan_engine(*options);
  });
}

glint_status glint_load_progress(glint_load_state* state) {
  return guarded([&] {
    require_struct(state, "state");
    const glint::LoadProgress& progress = glint::load_progress();
    state->is_loading = progress.is_loading ? 1 : 0;
    state->bytes_done = progress.bytes_done;
    state->bytes_total = progress.bytes_total;
  });
}

glint_status glint_init_engine(const glint_engine_options* options, const glint_tensor* tensors, int64_t count,
                               glint_engine** engine) {
  return guarded([&] {
    require_argument(engine != nullptr, "the place for the engine is null");
    require_struct(options, "options");
    const bool has_table = options->synthetic_seed != 0 ? count == 0 : tensors != nullptr && count > 0;
    require_argument(has_table && count < (int64_t{1} << 32), "the tensor table has ", count, " tensors",
                     options->synthetic_seed != 0
                         ? ", but with options.synthetic_seed the weights are random: give none"
                         : ": a checkpoint has at least one");
    const glint::LoadEnd load_end;
    auto handle = std::make_unique<glint_engine>();
    handle->engine =
        std::make_shared<glint::Engine>(*options, std::span<const glint_tensor>{tensors, static_cast<size_t>(count)});
    const std::lock_guard lock(live_mutex);
    live_engines().insert(handle.get());
    *engine = handle.release();
  });
}

glint_status glint_free_engine(glint_engine* engine) {
  return guarded([&] {
    require_argument(engine != nullptr, "the engine is null");
    {
      const std::lock_guard lock(live_mutex);
      require_argument(live_engines().erase(engine) == 1, "the engine handle is not one of a living engine");
    }
    delete engine;
  });
}

glint_status glint_add_request(glint_engine* engine, const glint_request* request, uint64_t* id) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> target = engine_of(engine);
    require_struct(request, "request");
    require_argument(id != nullptr, "the place for the request id is null");
    *id = target->add_request(*request);
  });
}

glint_status glint_free_request(glint_engine* engine, uint64_t id) {
  return guarded([&] { engine_of(engine)->free_request(id); });
}

glint_status glint_release_pages(glint_engine* engine, uint64_t id) {
  return guarded([&] { engine_of(engine)->release_pages(id); });
}

glint_status glint_limit_reuse(glint_engine* engine, uint64_t id, int32_t reusable_tokens) {
  return guarded([&] { engine_of(engine)->limit_reuse(id, reusable_tokens); });
}

glint_status glint_submit_step(glint_engine* engine, glint_step_item* items, int32_t count, glint_ticket* ticket) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> target = engine_of(engine);
    require_struct(ticket, "ticket");
    require_argument(items != nullptr && count > 0, "a step has ", count, " items, expected at least 1");
    target->submit_step({items, static_cast<size_t>(count)}, *ticket);
  });
}

glint_status glint_sample_step(glint_engine* engine, const glint_ticket* ticket, const glint_masks* masks) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> target = engine_of(engine);
    require_struct(ticket, "ticket");
    if (masks != nullptr) {
      require_struct(masks, "masks");
      require_argument(masks->count >= 0 && (masks->count == 0 || masks->masks != nullptr), "masks.count is ",
                       masks->count, " with a null array or below zero");
    }
    target->sample_step(*ticket, masks);
  });
}

glint_status glint_collect_step(glint_engine* engine, const glint_ticket* ticket, glint_step_results* results) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> target = engine_of(engine);
    require_struct(ticket, "ticket");
    require_struct(results, "results");
    target->collect_step(*ticket, *results);
  });
}

glint_status glint_prefill(glint_engine* engine, uint64_t id, glint_step_results* results) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> target = engine_of(engine);
    require_struct(results, "results");
    target->run_alone(id, true, *results);
  });
}

glint_status glint_decode_step(glint_engine* engine, uint64_t id, glint_step_results* results) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> target = engine_of(engine);
    require_struct(results, "results");
    target->run_alone(id, false, *results);
  });
}

glint_status glint_stats(glint_engine* engine, glint_engine_stats* stats) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> target = engine_of(engine);
    require_struct(stats, "stats");
    *stats = target->stats();
  });
}

glint_status glint_measure_read(glint_engine* engine, uint64_t byte_count, double* bytes_per_second) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> target = engine_of(engine);
    require_argument(bytes_per_second != nullptr, "the place for the bytes per second is null");
    *bytes_per_second = target->measure_read(byte_count);
  });
}

glint_status glint_measure_arithmetic(glint_engine* engine, glint_arithmetic* arithmetic) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> target = engine_of(engine);
    require_struct(arithmetic, "arithmetic");
    target->measure_arithmetic(*arithmetic);
  });
}

glint_status glint_check(glint_engine* engine) {
  return guarded([&] { engine_of(engine)->check(); });
}
