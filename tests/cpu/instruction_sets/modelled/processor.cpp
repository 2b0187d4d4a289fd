#include "cpu/processor.h"

namespace glint {

bool processor_runs(int32_t) { return true; }

}
