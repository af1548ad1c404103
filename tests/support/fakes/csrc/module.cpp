// The functions that Python's side of the device calls.
#include "calls.h"
#include "generators.h"
#include "memory.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

namespace {

using torch::wrap_pybind_function;

c10::Stream stream_of(int device, int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, {sim::kKind, static_cast<sim::Index>(device)}, number);
}

sim::CaptureMode mode_of(const std::string& name) {
  if (name == "relaxed") return sim::CaptureMode::relaxed;
  return name == "thread_local" ? sim::CaptureMode::thread_local_ : sim::CaptureMode::global;
}

std::string name_of(sim::CaptureMode mode) {
  if (mode == sim::CaptureMode::relaxed) return "relaxed";
  return mode == sim::CaptureMode::thread_local_ ? "thread_local" : "global";
}

std::map<std::string, size_t> memory(int device) {
  const auto now = sim::memory_of(static_cast<sim::Index>(device));
  return {
      {"total", now.total}, {"allocated", now.allocated}, {"peak", now.peak}, {"reserved", now.reserved},
      {"reserved_peak", now.reserved_peak}, {"allocations", now.allocations}};
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", [] { return static_cast<int>(sim::device_count()); });
  m.def("physical_index", wrap_pybind_function([](int device) { return sim::physical_index(static_cast<sim::Index>(device)); }));
  m.def("is_initialized", [] { return sim::is_initialized(); });
  m.def("in_bad_fork", [] { return sim::in_bad_fork(); });
  m.def("has_context", [](int device) { return sim::has_context(static_cast<sim::Index>(device)); });
  m.def("initialize", wrap_pybind_function([] { sim::initialize(); }));
  m.def("use", wrap_pybind_function([](int device) { sim::use(static_cast<sim::Index>(device)); }));
  m.def("memory", wrap_pybind_function([](int device) { return memory(device); }));
  m.def("limit_memory", wrap_pybind_function([](int device, double share) { sim::limit_memory(static_cast<sim::Index>(device), share); }));
  m.def("reset_peak", wrap_pybind_function([](int device) { sim::reset_peak(static_cast<sim::Index>(device)); }));
  m.def("empty_cache", wrap_pybind_function([](int device) { sim::empty_cache(static_cast<sim::Index>(device)); }));
  m.def("set_duration", [](const std::string& op, double us) { sim::set_duration(op, static_cast<sim::Time>(us * 1e3)); });
  m.def("set_default_duration", [](double us) { sim::set_default_duration(static_cast<sim::Time>(us * 1e3)); });
  m.def("fail", [](const std::string& op, const std::string& message) { sim::fail(op, message); });
  m.def("sleep", wrap_pybind_function([](int device, int64_t number, int64_t ns) {
    sim::launch(stream_of(device, number), "sleep", ns);
  }));
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(sim::default_generator(static_cast<sim::Index>(device))));
  });
  m.def("is_capturing", wrap_pybind_function([](int device, int64_t number) {
    return sim::capture_of(stream_of(device, number)) != nullptr;
  }));
  m.def("exchange_capture_mode", [](const std::string& name) { return name_of(sim::exchange_capture_mode(mode_of(name))); });
  py::class_<sim::Capture, sim::CapturePtr>(m, "Capture");
  m.def("begin_capture", wrap_pybind_function([](int device, int64_t number, const std::string& mode) {
    return sim::begin_capture(stream_of(device, number), mode_of(mode));
  }));
  m.def("end_capture", wrap_pybind_function([](const sim::CapturePtr& capture) { sim::end_capture(capture); }));
  m.def("replay", wrap_pybind_function([](const sim::CapturePtr& capture) { sim::replay(capture); }));
}
