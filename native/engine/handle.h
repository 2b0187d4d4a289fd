#pragma once

#include <memory>

#include "engine/engine.h"

struct glint_engine {
  std::unique_ptr<glint::Engine> engine;
};

namespace glint {

Engine& engine_of(glint_engine* handle);

}
