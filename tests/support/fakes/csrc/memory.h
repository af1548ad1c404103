// Memory of the devices: how much there is, and which calls read and write what.
#pragma once

#include "device.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace sim {

struct Memory {
  size_t total, allocated, peak, reserved, reserved_peak, allocations;
};

struct Access {
  int stream;
  uint64_t number;
  int64_t low, high; // bytes of the block
  bool writes;
  std::string op;
};

Memory memory_of(Index device);
void limit_memory(Index device, double fraction);
void reset_peak(Index device);
void empty_cache(Index device);

// A storage of a device that owns memory of the host.
c10::Storage adopt(c10::Storage host, Index device);
void grow(c10::StorageImpl* storage, size_t bytes);
// Raises where a call would touch memory that another stream writes, and nothing lets it wait for that.
void note_access(const c10::Storage& storage, const Launch& launch, Access access);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

} // namespace sim
