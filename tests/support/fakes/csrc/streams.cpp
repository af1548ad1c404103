// Streams in virtual time, events, what the host waits for, and captures.
#include "runtime.h"

#include <algorithm>
#include <chrono>

namespace sim {

namespace {

thread_local CaptureMode mode_of_thread = CaptureMode::global;

void merge(Clock& into, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

StreamState& state_of(const c10::Stream& stream) { return state().streams[key_of(stream)]; }

// The host has waited for all that a clock counts.
void tell_host(const Clock& clock) {
  merge(state().host, clock);
  std::vector<HostAction> ready;
  auto& actions = state().actions;
  const auto is_ready = [](const HostAction& action) { return state().host[action.stream] >= action.number; };
  std::copy_if(actions.begin(), actions.end(), std::back_inserter(ready), is_ready);
  actions.erase(std::remove_if(actions.begin(), actions.end(), is_ready), actions.end());
  for (auto& action : ready) action.run();
}

void wait_until(Time time) {
  for (Time now = host_time(); now < time; now = host_time())
    std::this_thread::sleep_for(std::chrono::nanoseconds(time - now));
}

[[noreturn]] void invalidate(const CapturePtr& capture, const std::string& reason) {
  if (capture->invalid.empty()) capture->invalid = reason;
  TORCH_CHECK(false, "SIM error: ", reason);
}

Event* checked(void* event) {
  auto* actual = static_cast<Event*>(event);
  use(actual->device);
  if (actual->capture) {
    const std::string reason = "operation not permitted on an event last recorded in a capturing stream";
    invalidate(actual->capture, reason);
  }
  return actual;
}

} // namespace

Time host_time() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

int key_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreams, "SIM error: invalid stream");
  return stream.device_index() * kStreams + static_cast<int>(stream.id());
}

std::string describe(int stream) {
  return "stream " + std::to_string(stream % kStreams) + " of sim:" + std::to_string(stream / kStreams);
}

Launch launch(const c10::Stream& stream, const std::string& op, std::optional<Time> duration, Time missed) {
  const auto device = stream.device_index();
  use(device);
  std::lock_guard guard(state_mutex());
  auto& self = state_of(stream);
  const auto known = state().durations.find(op);
  const Time takes =
      duration.value_or(known == state().durations.end() ? state().default_duration : known->second) + missed;
  if (self.capture) {
    TORCH_CHECK(self.capture->invalid.empty(), "SIM error: the capture was invalidated: ", self.capture->invalid);
    self.capture->duration += takes;
    return {key_of(stream), 0, self.clock};
  }
  const auto failure = state().failures.find(op);
  if (failure != state().failures.end()) {
    if (state().devices[device].pending.empty()) state().devices[device].pending = failure->second;
    state().failures.erase(failure);
  }
  merge(self.clock, state().host);
  const auto before = self.clock;
  self.tail = std::max(self.tail, host_time()) + takes;
  return {key_of(stream), ++self.clock[key_of(stream)], before};
}

bool query_stream(const c10::Stream& stream) {
  use(stream.device_index());
  std::lock_guard guard(state_mutex());
  forbid_in_stream(stream, "cudaStreamQuery");
  forbid_in_capture("query of a stream");
  if (host_time() < state_of(stream).tail) return false;
  raise_pending(stream.device_index());
  tell_host(state_of(stream).clock);
  return true;
}

void synchronize_stream(const c10::Stream& stream) {
  use(stream.device_index());
  Time tail;
  Clock clock;
  {
    std::lock_guard guard(state_mutex());
    forbid_in_stream(stream, "synchronize");
    forbid_in_capture("synchronize");
    tail = state_of(stream).tail;
    clock = state_of(stream).clock;
  }
  wait_until(tail);
  std::lock_guard guard(state_mutex());
  raise_pending(stream.device_index());
  tell_host(clock);
}

void synchronize_device(Index device) {
  if (device < 0) device = current_device();
  for (int number = 0; number < kStreams; ++number)
    synchronize_stream(c10::Stream(c10::Stream::UNSAFE, {kKind, device}, number));
}

void wait_for(const c10::Stream& later, const c10::Stream& earlier) {
  std::lock_guard guard(state_mutex());
  merge(state_of(later).clock, state_of(earlier).clock);
  state_of(later).tail = std::max(state_of(later).tail, state_of(earlier).tail);
}

void when_waited_for(const Launch& launch, std::function<void()> action) {
  std::lock_guard guard(state_mutex());
  state().actions.push_back({launch.stream, launch.number, std::move(action)});
}

void record_event(void** event, const c10::Stream& stream) {
  use(stream.device_index());
  std::lock_guard guard(state_mutex());
  if (*event == nullptr) *event = new Event{stream.device_index(), 0, {}, nullptr};
  auto* self = static_cast<Event*>(*event);
  TORCH_CHECK(
      self->device == stream.device_index(),
      "Event device ", static_cast<int>(self->device), " does not match recording stream's device ",
      static_cast<int>(stream.device_index()), ".");
  auto& of_stream = state_of(stream);
  merge(of_stream.clock, state().host);
  self->capture = of_stream.capture;
  self->time = of_stream.tail = std::max(of_stream.tail, host_time());
  self->clock = of_stream.clock;
}

void block_on_event(void* event, const c10::Stream& stream) {
  if (event == nullptr) return;
  use(stream.device_index());
  std::lock_guard guard(state_mutex());
  auto* self = static_cast<Event*>(event);
  auto& of_stream = state_of(stream);
  if (self->capture && !of_stream.capture) {
    of_stream.capture = self->capture;
    self->capture->streams.insert(key_of(stream));
  }
  if (of_stream.capture && of_stream.capture != self->capture)
    invalidate(of_stream.capture, "dependency created on uncaptured work in another stream");
  merge(of_stream.clock, self->clock);
  of_stream.tail = std::max(of_stream.tail, self->time);
}

bool query_event(void* event) {
  if (event == nullptr) return true;
  std::lock_guard guard(state_mutex());
  auto* self = checked(event);
  forbid_in_capture("query of an event");
  if (host_time() < self->time) return false;
  raise_pending(self->device);
  tell_host(self->clock);
  return true;
}

void synchronize_event(void* event) {
  if (event == nullptr) return;
  Event waited;
  {
    std::lock_guard guard(state_mutex());
    waited = *checked(event);
    forbid_in_capture("synchronize");
  }
  wait_until(waited.time);
  std::lock_guard guard(state_mutex());
  raise_pending(waited.device);
  tell_host(waited.clock);
}

double elapsed_ms(void* before, void* after) {
  TORCH_CHECK(before && after, "Both events must be recorded before calculating elapsed time.");
  std::lock_guard guard(state_mutex());
  const auto *first = checked(before), *second = checked(after);
  TORCH_CHECK(first->device == second->device, "SIM error: the events are of two devices");
  TORCH_CHECK(host_time() >= std::max(first->time, second->time), "SIM error: device not ready");
  return static_cast<double>(second->time - first->time) / 1e6;
}

CapturePtr capture_of(const c10::Stream& stream) {
  std::lock_guard guard(state_mutex());
  return is_initialized() ? state_of(stream).capture : nullptr;
}

CapturePtr begin_capture(const c10::Stream& stream, CaptureMode mode) {
  std::lock_guard guard(state_mutex());
  TORCH_CHECK(stream.id() != 0, "SIM graphs must be captured on a non-default stream");
  TORCH_CHECK(!state_of(stream).capture, "SIM error: the stream captures already");
  auto capture = std::make_shared<Capture>();
  capture->thread = std::this_thread::get_id();
  capture->mode = mode;
  capture->streams.insert(key_of(stream));
  state_of(stream).capture = capture;
  state().captures.push_back(capture);
  return capture;
}

void end_capture(const CapturePtr& capture) {
  std::lock_guard guard(state_mutex());
  for (const int key : capture->streams) state().streams[key].capture = nullptr;
  auto& all = state().captures;
  all.erase(std::remove(all.begin(), all.end(), capture), all.end());
  TORCH_CHECK(
      capture->invalid.empty(), "SIM error: operation failed due to a previous error during capture: ", capture->invalid);
}

CaptureMode exchange_capture_mode(CaptureMode mode) { return std::exchange(mode_of_thread, mode); }

void forbid_in_capture(const std::string& what) {
  if (mode_of_thread == CaptureMode::relaxed) return;
  std::lock_guard guard(state_mutex());
  const auto here = std::this_thread::get_id();
  for (const auto& capture : state().captures) {
    const bool everywhere = capture->mode == CaptureMode::global && mode_of_thread == CaptureMode::global;
    if (everywhere || (capture->mode != CaptureMode::relaxed && capture->thread == here))
      invalidate(capture, "operation not permitted when stream is capturing: " + what);
  }
}

void forbid_in_stream(const c10::Stream& stream, const std::string& what) {
  std::lock_guard guard(state_mutex());
  if (const auto capture = state_of(stream).capture)
    invalidate(capture, "operation not permitted when stream is capturing: " + what);
}

} // namespace sim
