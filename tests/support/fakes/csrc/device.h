// What the parts of the simulated accelerator share: its clock, its context, streams, events, captures and errors.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace sim {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 33; // the default stream and a pool, which is used again from its beginning as on CUDA

using Time = int64_t; // ns
using Index = c10::DeviceIndex;
using Clock = std::vector<uint64_t>; // how many calls of each stream happened before

Time host_time();
std::recursive_mutex& state_mutex();

// Contexts. That of a device is made by its first use, and is of no use in a fork.
Index device_count() noexcept;
int physical_index(Index device);
bool is_initialized();
bool has_context(Index device);
bool in_bad_fork();
void initialize(); // the driver, which makes no context yet
void use(Index device);

// The current device and streams of this thread.
Index current_device();
void set_current_device(Index device);
c10::Stream current_stream(Index device, bool starts = true);
c10::Stream exchange_stream(c10::Stream stream, bool starts = true);
c10::Stream new_stream(Index device);
c10::Stream default_stream(Index device);

enum class CaptureMode { global, thread_local_, relaxed };

struct Capture {
  std::thread::id thread;
  CaptureMode mode;
  std::set<int> streams;
  std::vector<std::function<void()>> calls;
  Time duration = 0, missed = 0;
  std::string invalid; // why, where it is
};
using CapturePtr = std::shared_ptr<Capture>;

// Work in streams.
struct Launch {
  int stream;
  uint64_t number;
  Clock before;
};
int key_of(const c10::Stream& stream);
std::string describe(int stream);
Launch launch(const c10::Stream& stream, const std::string& op, std::optional<Time> duration = std::nullopt, Time missed = 0);
bool query_stream(const c10::Stream& stream);
void synchronize_stream(const c10::Stream& stream);
void synchronize_device(Index device);
void wait_for(const c10::Stream& later, const c10::Stream& earlier);
void when_waited_for(const Launch& launch, std::function<void()> action);

struct Event {
  Index device;
  Time time;
  Clock clock;
  CapturePtr capture; // that it was recorded in
};
void record_event(void** event, const c10::Stream& stream);
void block_on_event(void* event, const c10::Stream& stream);
bool query_event(void* event);
void synchronize_event(void* event);
double elapsed_ms(void* before, void* after);

// Graphs.
CapturePtr capture_of(const c10::Stream& stream);
CapturePtr begin_capture(const c10::Stream& stream, CaptureMode mode);
void end_capture(const CapturePtr& capture);
CaptureMode exchange_capture_mode(CaptureMode mode);
void forbid_in_capture(const std::string& what); // raises where what runs elsewhere is unsafe for a capture
void forbid_in_stream(const c10::Stream& stream, const std::string& what);

// Faults that tests plant.
void set_duration(const std::string& op, Time duration);
void set_default_duration(Time duration);
void fail(const std::string& op, const std::string& message);

} // namespace sim
