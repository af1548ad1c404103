// Random numbers of a device.
#pragma once

#include "device.h"

#include <ATen/core/Generator.h>

namespace sim {

at::Generator& default_generator(Index device);

} // namespace sim
