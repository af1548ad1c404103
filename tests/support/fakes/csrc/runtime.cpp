// The context, this thread's devices and streams, and errors that stay.
#include "runtime.h"

#include <c10/util/string_view.h>
#include <pthread.h>
#include <torch/version.h>

#include <cstdlib>
#include <sstream>

namespace sim {

namespace {

std::vector<int> visible_devices() {
  const char* count = std::getenv("SIM_DEVICES");
  const int devices = count ? std::atoi(count) : 2;
  std::vector<int> visible;
  if (const char* names = std::getenv("SIM_VISIBLE_DEVICES")) {
    std::stringstream text(names);
    for (std::string name; std::getline(text, name, ',');) {
      const int index = std::atoi(name.c_str());
      if (index >= devices) break;
      visible.push_back(index);
    }
  } else {
    for (int index = 0; index < devices; ++index) visible.push_back(index);
  }
  return visible;
}

bool context_exists = false, bad_fork = false;
thread_local Index device_of_thread = 0;
thread_local std::map<Index, c10::StreamId> streams_of_thread;
std::map<Index, int> streams_given;

// What a variable says of operators: "aten::sin=device-side assert triggered;aten::mm=..."
std::map<std::string, std::string> by_operator(const char* variable) {
  std::map<std::string, std::string> values;
  const char* value = std::getenv(variable);
  std::stringstream text(value ? value : "");
  for (std::string part; std::getline(text, part, ';');) {
    const auto end = part.find('=');
    if (end != std::string::npos) values[part.substr(0, end)] = part.substr(end + 1);
  }
  return values;
}

[[noreturn]] void raise_error(const std::string& message) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "SIM error: " + message);
#else
  TORCH_CHECK(false, "SIM error: ", message);
#endif
}

} // namespace

std::recursive_mutex& state_mutex() {
  static auto* mutex = new std::recursive_mutex();
  return *mutex;
}

State& state() {
  static auto* state = new State();
  return *state;
}

Index device_count() noexcept {
  return static_cast<Index>(context_exists ? state().visible.size() : visible_devices().size());
}

int physical_index(Index device) {
  const auto visible = context_exists ? state().visible : visible_devices();
  TORCH_CHECK(device >= 0 && device < static_cast<Index>(visible.size()), "SIM error: invalid device ordinal");
  return visible[device];
}

bool is_initialized() { return context_exists && !bad_fork; }

bool has_context(Index device) {
  std::lock_guard guard(state_mutex());
  return is_initialized() && device < device_count() && state().devices[device].used;
}

bool in_bad_fork() { return bad_fork; }

void initialize() {
  TORCH_CHECK(
      !bad_fork,
      "Cannot re-initialize SIM in forked subprocess. To use SIM with multiprocessing, you must use the 'spawn' start "
      "method");
  std::lock_guard guard(state_mutex());
  if (!context_exists) {
    state().visible = visible_devices();
    state().devices.resize(state().visible.size());
    state().streams.resize(state().visible.size() * kStreams);
    for (auto& stream : state().streams) stream.clock.resize(state().streams.size());
    state().host.resize(state().streams.size());
    state().failures.merge(by_operator("SIM_FAIL"));
    for (const auto& [op, us] : by_operator("SIM_DURATIONS"))
      state().durations.try_emplace(op, static_cast<Time>(1e3 * std::atof(us.c_str())));
    pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
    context_exists = true;
  }
}

void use(Index device) {
  initialize();
  std::lock_guard guard(state_mutex());
  TORCH_CHECK(device >= 0 && device < device_count(), "SIM error: invalid device ordinal");
  state().devices[device].used = true;
  if (!state().devices[device].error.empty()) raise_error(state().devices[device].error);
}

void raise_pending(Index device) {
  auto& of_device = state().devices[device];
  if (of_device.pending.empty()) return;
  of_device.error = of_device.pending;
  raise_error(of_device.error);
}

void fail(const std::string& op, const std::string& message) {
  std::lock_guard guard(state_mutex());
  state().failures[op] = message;
}

void set_duration(const std::string& op, Time duration) {
  std::lock_guard guard(state_mutex());
  state().durations[op] = duration;
}

void set_default_duration(Time duration) {
  std::lock_guard guard(state_mutex());
  state().default_duration = duration;
}

Index current_device() { return device_of_thread; }

void set_current_device(Index device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "SIM error: invalid device ordinal");
  device_of_thread = device;
}

c10::Stream current_stream(Index device, bool starts) {
  if (device < 0) device = device_of_thread;
  if (starts) initialize();
  return c10::Stream(c10::Stream::UNSAFE, {kKind, device}, streams_of_thread[device]);
}

c10::Stream exchange_stream(c10::Stream stream, bool starts) {
  const auto before = current_stream(stream.device_index(), starts);
  streams_of_thread[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(Index device) {
  if (device < 0) device = device_of_thread;
  use(device);
  std::lock_guard guard(state_mutex());
  const int number = 1 + streams_given[device]++ % (kStreams - 1);
  return c10::Stream(c10::Stream::UNSAFE, {kKind, device}, number);
}

c10::Stream default_stream(Index device) {
  initialize();
  return c10::Stream(c10::Stream::UNSAFE, {kKind, device < 0 ? device_of_thread : device}, 0);
}

} // namespace sim
