#pragma once

#include <memory>

#include "engine/engine.h"

struct glint_engine {
  std::shared_ptr<glint::Engine> engine;
};

namespace glint {

std::shared_ptr<Engine> engine_of(glint_engine* handle);

}
