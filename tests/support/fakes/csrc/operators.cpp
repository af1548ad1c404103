// Operators that the fallback does not run: what makes memory, what copies, and what the host reads.
#include "calls.h"
#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

namespace {

using c10::IntArrayRef;
using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using MaybeDevice = std::optional<c10::Device>;
using Flag = std::optional<bool>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(IntArrayRef size, Dtype dtype, Layout, MaybeDevice device, Flag, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, Layout, MaybeDevice device, Flag) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// Memory that is freed is never used again here.
void record_stream(at::Tensor& self, c10::Stream stream) { TORCH_CHECK(stream.device_type() == kKind, "a foreign stream"); }

void reshape(const at::Tensor& self, IntArrayRef size, IntArrayRef stride, int64_t offset) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(size, stride, offset);
  const size_t bytes = at::detail::computeStorageNbytes(size, stride, self.itemsize(), offset);
  if (bytes > self.storage().nbytes()) grow(self.storage().unsafeGetStorageImpl(), bytes);
}

const at::Tensor& resize_(const at::Tensor& self, IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  std::vector<int64_t> strides(size.size(), 1);
  for (size_t i = size.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(size[i], 1);
  reshape(self, size, strides, self.storage_offset());
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_part(at::Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (strides.size() < size.size()) {
    strides.assign(size.size(), 1);
    for (size_t i = size.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(size[i], 1);
  }
  reshape(self, size, strides, offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_part(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// A copy between tensors of which one at least is ours. One to pinned memory has come when somebody has waited for it.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const bool from_host = self.is_cpu(), to_host = to.is_cpu();
  const auto stream = current_stream(from_host ? to.device().index() : self.device().index());
  const auto other = current_stream(to_host ? self.device().index() : to.device().index());
  const std::string op = "aten::copy_";
  const bool is_host_copy = from_host || to_host;
  if (is_host_copy && !non_blocking) forbid_in_stream(stream, "copy between host and device");
  if (is_host_copy && !capture_of(stream)) forbid_in_capture("copy between host and device");
  if (other != stream) wait_for(stream, other);
  const auto launched = launch(stream, op);
  note(self, launched, false, op);
  note(to, launched, true, op);
  if (other != stream) wait_for(other, stream);
  auto copy = [from = on_host(self), into = on_host(to)]() mutable { into.copy_(from); };
  if (const auto capture = capture_of(stream)) {
    capture->calls.push_back([copy, self, to]() mutable { copy(); });
  } else if (non_blocking && to_host && is_pinned(to.const_data_ptr())) {
    auto snapshot = on_host(self).clone();
    if (to.is_non_overlapping_and_dense()) std::memset(to.mutable_data_ptr(), 0xff, to.nbytes());
    when_waited_for(launched, [snapshot, into = to.detach()]() mutable { into.copy_(snapshot); });
  } else {
    copy();
    // memory that is not pinned is read and written by the host, which waits
    if (to_host || (from_host && !non_blocking)) synchronize_stream(stream);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const auto stream = current_stream(self.device().index());
  forbid_in_stream(stream, "read by the host");
  forbid_in_capture("read by the host");
  const auto launched = launch(stream, "aten::_local_scalar_dense");
  note(self, launched, false, "aten::_local_scalar_dense");
  synchronize_stream(stream);
  return on_host(self).item();
}

// Convolutions have names of their own for devices that torch does not know.
template <const char* name, bool backward>
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto host = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  if (backward) {
    const size_t first = stack->size() - op.schema().arguments().size();
    // how many biases there are
    const auto channels = (*stack)[first].toTensor().size(1);
    stack->insert(stack->begin() + first + 3, c10::IValue(std::vector<int64_t>{channels}));
  }
  run(host, stack);
}
constexpr char kForward[] = "aten::convolution", kBackward[] = "aten::convolution_backward";

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, stack); }

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution<kForward, false>>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution<kBackward, true>>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
}

} // namespace sim
