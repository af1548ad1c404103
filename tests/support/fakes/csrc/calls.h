// Calls of operators on the device: their arguments seen as the host's, their results brought back.
#pragma once

#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor);
// Notes that a call reads or writes a tensor.
void note(const at::Tensor& tensor, const Launch& launch, bool writes, const std::string& op);
// Runs an operator on a stack that has its arguments, which become its results.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// Runs the calls of a capture again.
void replay(const CapturePtr& capture);

} // namespace sim
