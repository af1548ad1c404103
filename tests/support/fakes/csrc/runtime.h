// The state behind device.h, for the files that keep it.
#pragma once

#include "device.h"

#include <memory>

namespace sim {

struct StreamState {
  Time tail = 0; // when its work ends
  Clock clock; // what happened before its next call
  CapturePtr capture;
};

struct DeviceState {
  bool used = false;
  std::string pending, error; // of a call that failed: before and after somebody has waited for it
};

struct HostAction {
  int stream;
  uint64_t number;
  std::function<void()> run;
};

struct State {
  std::vector<int> visible;
  std::vector<DeviceState> devices;
  std::vector<StreamState> streams;
  Clock host; // what the host has waited for
  std::vector<HostAction> actions;
  std::vector<CapturePtr> captures;
  std::map<std::string, std::string> failures;
  std::map<std::string, Time> durations;
  Time default_duration = 20'000;
};

State& state();
void raise_pending(Index device);

} // namespace sim
