// The fallback: any operator of the host, run at once, and put into a stream in virtual time.
#include "calls.h"
#include "generators.h"
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <list>

namespace sim {

namespace {

using torch::jit::Stack;

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kKind; }

c10::Storage host_view(const c10::Storage& storage) {
  // one that may be resized, upon which its memory is another
  c10::DataPtr data(storage.data_ptr().get(), c10::DeviceType::CPU);
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true};
}

at::Tensor with_storage(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The tensors of one call on both sides.
class Sides {
 public:
  explicit Sides(Index device) : device_(device) {}

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    for (const auto& [ours, host] : tensors_)
      if (ours.is_same(tensor)) return host;
    auto storage = storage_of(host_storages_, tensor.storage(), [&] { return host_view(tensor.storage()); });
    tensors_.emplace_back(tensor, with_storage(tensor, std::move(storage), c10::DispatchKey::CPU));
    return tensors_.back().second;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || is_ours(tensor)) return tensor;
    for (const auto& [ours, host] : tensors_)
      if (host.is_same(tensor)) return ours;
    for (const auto& [ours, host] : host_storages_)
      if (host.is_alias_of(tensor.storage())) return with_storage(tensor, ours, c10::DispatchKey::PrivateUse1);
    for (const auto& argument : host_arguments)
      if (argument.is_same(tensor)) return tensor;
    auto storage = storage_of(results_, tensor.storage(), [&] { return adopt(tensor.storage(), device_); });
    return with_storage(tensor, std::move(storage), c10::DispatchKey::PrivateUse1);
  }

  // What was resized on the host's side is resized on ours.
  void take_over() {
    for (auto& [ours, host] : tensors_) {
      auto* storage = ours.storage().unsafeGetStorageImpl();
      if (host.storage().data() != storage->data()) {
        grow(storage, host.storage().nbytes());
        std::memcpy(storage->mutable_data(), host.storage().data(), host.storage().nbytes());
      }
      if (host.sizes() != ours.sizes() || host.strides() != ours.strides())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  std::vector<at::Tensor> host_arguments;

 private:
  using Storages = std::vector<std::pair<c10::Storage, c10::Storage>>;
  template <class Make>
  static c10::Storage storage_of(Storages& storages, const c10::Storage& key, Make make) {
    for (const auto& [from, to] : storages)
      if (from.is_alias_of(key)) return to;
    storages.emplace_back(key, make());
    return storages.back().second;
  }

  Index device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  Storages host_storages_, results_;
};

// Applies a function to each tensor that a value holds.
template <class Function>
c10::IValue mapped(const c10::IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      tensors.push_back(tensor ? std::optional(function(*tensor)) : std::nullopt);
    return tensors;
  }
  return value;
}

template <class Function>
void for_last(Stack* stack, size_t count, Function function) {
  for (size_t i = stack->size() - count; i < stack->size(); ++i) function((*stack)[i]);
}

bool writes(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

bool is_view(const c10::FunctionSchema& schema) {
  const auto aliases = [](const c10::Argument& result) { return result.alias_info() && !writes(result.alias_info()); };
  return std::any_of(schema.returns().begin(), schema.returns().end(), aliases);
}

// The device's random numbers in the place of the host's while an operator runs.
class RandomNumbers {
 public:
  RandomNumbers(bool draws, at::Generator generator) : generator_(std::move(generator)), draws_(draws) {
    if (!draws_) return;
    host_state_ = host_.get_state();
    host_.set_state(generator_.get_state());
  }
  ~RandomNumbers() {
    if (!draws_) return;
    generator_.set_state(host_.get_state());
    host_.set_state(host_state_);
  }

 private:
  at::Generator generator_, host_ = at::detail::getDefaultCPUGenerator();
  bool draws_;
  at::Tensor host_state_;
};

struct Arguments {
  std::vector<at::Tensor> read, written;
  std::optional<Index> device;
};

Arguments examine(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> values) {
  const auto& schema = op.schema();
  Arguments arguments;
  bool has_host_tensor = false;
  for (size_t i = 0; i < values.size(); ++i) {
    auto& tensors = writes(schema.arguments()[i].alias_info()) ? arguments.written : arguments.read;
    mapped(values[i], [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        TORCH_CHECK(
            arguments.device.value_or(tensor.device().index()) == tensor.device().index() || tensor.dim() == 0,
            "Expected all tensors to be on the same device, but found at least two devices, sim:",
            static_cast<int>(*arguments.device), " and ", tensor.device(), "! (", schema.name(), ")");
        if (tensor.dim() > 0 || !arguments.device) arguments.device = tensor.device().index();
        tensors.push_back(tensor);
      } else if (tensor.defined() && tensor.dim() > 0 && tensor.is_floating_point()) {
        has_host_tensor = true;
      }
      return tensor;
    });
    if (values[i].isDevice() && values[i].toDevice().type() == kKind && values[i].toDevice().has_index())
      arguments.device = values[i].toDevice().index();
  }
  TORCH_CHECK(
      !has_host_tensor, "Expected all tensors to be on the same device, but found at least two devices, sim and cpu! (",
      schema.name(), ")");
  return arguments;
}

// The memory that was used last, SIM_CACHE bytes of it. Other memory takes a nanosecond for every eight bytes.
class Cache {
 public:
  Time use(const std::vector<at::Tensor>& tensors) {
    Time ns = 0;
    for (const auto& tensor : size_ > 0 ? tensors : std::vector<at::Tensor>()) {
      const auto* data = tensor.data_ptr();
      const auto found = std::find_if(used_.begin(), used_.end(), [&](const auto& use) { return use.first == data; });
      if (found == used_.end()) {
        ns += static_cast<Time>(tensor.nbytes()) / 8;
      } else {
        bytes_ -= found->second;
        used_.erase(found);
      }
      used_.emplace_front(data, static_cast<int64_t>(tensor.nbytes()));
      for (bytes_ += used_.front().second; bytes_ > size_; used_.pop_back()) bytes_ -= used_.back().second;
    }
    return ns;
  }

 private:
  int64_t size_ = std::atoll(std::getenv("SIM_CACHE") ? std::getenv("SIM_CACHE") : "0"), bytes_ = 0;
  std::list<std::pair<const void*, int64_t>> used_;
};

Cache& cache() {
  static Cache of_device;
  return of_device;
}

Time use(const Arguments& arguments) { return cache().use(arguments.read) + cache().use(arguments.written); }

void compute(const c10::OperatorHandle& op, Stack* stack, Index device) {
  const auto& schema = op.schema();
  Sides sides(device);
  at::Generator generator = default_generator(device);
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for_last(stack, schema.arguments().size(), [&](c10::IValue& value) {
    if (value.isGenerator()) {
      generator = value.toGenerator();
      draws = true;
      value = c10::IValue();
    } else if (value.isDevice()) {
      value = c10::Device(c10::DeviceType::CPU);
    } else {
      value = mapped(value, [&](const at::Tensor& tensor) {
        if (!is_ours(tensor)) sides.host_arguments.push_back(tensor);
        return sides.to_host(tensor);
      });
    }
  });
  {
    RandomNumbers numbers(draws, generator);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  sides.take_over();
  for_last(stack, schema.returns().size(), [&](c10::IValue& value) {
    value = mapped(value, [&](const at::Tensor& tensor) { return sides.to_device(tensor); });
  });
}

std::vector<char> bytes_of(const at::Tensor& tensor) {
  const auto* data = static_cast<const char*>(tensor.storage().data());
  return {data, data + tensor.storage().nbytes()};
}

// Keeps a call for the graph. What it writes into stays as it was, since a capture runs nothing.
void keep(const CapturePtr& capture, const c10::OperatorHandle& op, Stack* stack, const Arguments& arguments, Index device) {
  const auto values = torch::jit::last(*stack, op.schema().arguments().size());
  Stack inputs(values.begin(), values.end());
  std::vector<std::vector<char>> before;
  for (const auto& tensor : arguments.written) before.push_back(bytes_of(tensor));
  compute(op, stack, device);
  for (size_t i = 0; i < before.size(); ++i)
    std::memcpy(arguments.written[i].storage().mutable_data(), before[i].data(),
        std::min(before[i].size(), arguments.written[i].storage().nbytes()));
  const auto values_out = torch::jit::last(*stack, op.schema().returns().size());
  Stack outputs(values_out.begin(), values_out.end());
  for (auto& value : outputs)
    mapped(value, [&](const at::Tensor& tensor) {
      const auto is_argument = [&](const at::Tensor& other) { return other.is_alias_of(tensor); };
      if (is_ours(tensor) && !std::any_of(arguments.written.begin(), arguments.written.end(), is_argument))
        // undefined until the graph runs, but no index that a later call of the capture refuses
        std::memset(tensor.storage().mutable_data(), c10::isIntegralType(tensor.scalar_type(), true) ? 0 : 0xff,
            tensor.storage().nbytes());
      return tensor;
    });
  capture->calls.push_back([=]() mutable {
    capture->missed += use(arguments);
    Stack again = inputs;
    compute(op, &again, device);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].isTensor() || !is_ours(outputs[i].toTensor())) continue;
      const at::Tensor to = outputs[i].toTensor(), from = again[i].toTensor();
      if (!to.is_alias_of(from))
        std::memcpy(to.storage().mutable_data(), from.storage().data(), std::min(to.storage().nbytes(), from.storage().nbytes()));
    }
  });
}

} // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  return is_ours(tensor) ? with_storage(tensor, host_view(tensor.storage()), c10::DispatchKey::CPU) : tensor;
}

void note(const at::Tensor& tensor, const Launch& launch, bool writes, const std::string& op) {
  if (!is_ours(tensor) || tensor.numel() == 0) return;
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const int64_t size = static_cast<int64_t>(tensor.itemsize());
  note_access(
      tensor.storage(), launch, {launch.stream, launch.number, tensor.storage_offset() * size, (last + 1) * size, writes, op});
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = examine(op, torch::jit::last(*stack, schema.arguments().size()));
  const Index device = arguments.device.value_or(current_device());
  if (is_view(schema)) return compute(op, stack, device);
  const auto stream = current_stream(device);
  // the host has to know how large its results are
  const bool is_read = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  if (is_read) {
    forbid_in_stream(stream, "read by the host");
    forbid_in_capture("read by the host");
  }
  const auto capture = capture_of(stream);
  const auto launched = launch(stream, schema.name(), std::nullopt, capture ? 0 : use(arguments));
  for (const auto& tensor : arguments.read) note(tensor, launched, false, schema.name());
  for (const auto& tensor : arguments.written) note(tensor, launched, true, schema.name());
  if (capture) return keep(capture, op, stack, arguments, device);
  compute(op, stack, device);
  for (const auto& value : torch::jit::last(*stack, schema.returns().size()))
    mapped(value, [&](const at::Tensor& tensor) {
      note(tensor, launched, true, schema.name());
      return tensor;
    });
  if (is_read) synchronize_stream(stream);
}

void replay(const CapturePtr& capture) {
  const auto stream = current_stream(current_device());
  capture->missed = 0;
  for (const auto& call : capture->calls) call();
  launch(stream, "graph", capture->duration, capture->missed);
}

} // namespace sim
