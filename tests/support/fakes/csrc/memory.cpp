// The allocator: memory of the host, counted and limited by device.
#include "memory.h"

#include <cstring>
#include <c10/core/CPUAllocator.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
#define SIM_DEVICE_ALLOCATOR
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <algorithm>
#include <cstdlib>

namespace sim {

namespace {

struct Block {
  Index device;
  size_t bytes;
  c10::Storage memory;
  std::vector<Access> accesses;
};

std::map<Index, Memory> memories;
std::map<const char*, size_t> pinned;

Memory& memory(Index device) {
  const char* bytes = std::getenv("SIM_MEMORY");
  const size_t total = bytes ? std::strtoull(bytes, nullptr, 10) : size_t{1} << 30;
  return memories.try_emplace(device, Memory{total, 0, 0, 0, 0, 0}).first->second;
}

std::map<Index, double> limits;

void take(Index device, size_t bytes) {
  std::lock_guard guard(state_mutex());
  auto& of_device = memory(device);
  const double limit = limits.count(device) ? limits[device] : 1.0;
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      of_device.allocated + bytes <= static_cast<size_t>(limit * static_cast<double>(of_device.total)),
      "SIM out of memory. Tried to allocate ", bytes, " bytes. SIM device ", static_cast<int>(device), " has ",
      of_device.total, " bytes, of which ", of_device.allocated, " are allocated.");
  of_device.allocated += bytes;
  of_device.allocations += 1;
  of_device.peak = std::max(of_device.peak, of_device.allocated);
  of_device.reserved = std::max(of_device.reserved, of_device.allocated);
  of_device.reserved_peak = std::max(of_device.reserved_peak, of_device.reserved);
  c10::reportMemoryUsageToProfiler(
      nullptr, static_cast<int64_t>(bytes), of_device.allocated, of_device.reserved, {kKind, device});
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard guard(state_mutex());
    auto& of_device = memory(block->device);
    of_device.allocated -= block->bytes;
    c10::reportMemoryUsageToProfiler(
        nullptr, -static_cast<int64_t>(block->bytes), of_device.allocated, of_device.reserved,
        {kKind, block->device});
  }
  delete block;
}

c10::DataPtr own(c10::Storage host, Index device) {
  use(device);
  if (!capture_of(current_stream(device))) forbid_in_capture("allocation");
  const size_t bytes = host.nbytes();
  take(device, bytes);
  void* data = host.mutable_data();
  return {data, new Block{device, bytes, std::move(host), {}}, &free_block, {kKind, device}};
}

c10::Storage host_storage(size_t bytes) {
  return {c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), /*resizable=*/true};
}

#ifdef SIM_DEVICE_ALLOCATOR
using Base = c10::DeviceAllocator;
#else
using Base = c10::Allocator;
#endif

struct Allocator final : Base {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    use(device);
    // before the host's memory is asked for, which may not be there
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= memory(device).total, "SIM out of memory. Tried to allocate ", bytes, " bytes.");
    auto data = own(host_storage(bytes), device);
    // nothing writes it before the graph runs: zeros are indices that no call of the capture refuses
    if (capture_of(current_stream(device))) std::memset(data.get(), 0, bytes);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
#ifdef SIM_DEVICE_ALLOCATOR
  bool initialized() override { return is_initialized(); }
  void emptyCache(c10::MempoolId_t) override {
    for (Index device = 0; device < device_count(); ++device) empty_cache(device);
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Index device) override {
    const auto now = memory_of(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.active_bytes[0].current = now.allocated;
    stats.allocated_bytes[0].peak = stats.active_bytes[0].peak = now.peak;
    stats.reserved_bytes[0].current = now.reserved;
    stats.reserved_bytes[0].peak = now.reserved_peak;
    stats.allocation[0].allocated = now.allocations;
    return stats;
  }
  void resetAccumulatedStats(Index) override {}
  void resetPeakStats(Index device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(Index device) {
    const auto now = memory_of(device);
    return {now.total - now.allocated, now.total};
  }
#endif
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    use(current_device());
    auto* block = new c10::Storage(host_storage(bytes));
    auto* data = static_cast<char*>(block->mutable_data());
    std::lock_guard guard(state_mutex());
    pinned[data] = bytes;
    return {data, block, &free_pinned, c10::DeviceType::CPU};
  }
  static void free_pinned(void* context) {
    auto* block = static_cast<c10::Storage*>(context);
    std::lock_guard guard(state_mutex());
    pinned.erase(static_cast<const char*>(block->data()));
    delete block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Allocator allocator;
PinnedAllocator pinned_memory;

} // namespace

Memory memory_of(Index device) {
  std::lock_guard guard(state_mutex());
  return memory(device);
}

void limit_memory(Index device, double fraction) {
  std::lock_guard guard(state_mutex());
  limits[device] = fraction;
}

void reset_peak(Index device) {
  std::lock_guard guard(state_mutex());
  memory(device).peak = memory(device).allocated;
  memory(device).reserved_peak = memory(device).reserved;
}

void empty_cache(Index device) {
  std::lock_guard guard(state_mutex());
  memory(device).reserved = memory(device).allocated;
}

c10::Storage adopt(c10::Storage host, Index device) {
  const size_t bytes = host.nbytes();
  return {c10::Storage::use_byte_size_t(), bytes, own(std::move(host), device), &allocator, /*resizable=*/true};
}

void grow(c10::StorageImpl* storage, size_t bytes) {
  auto host = host_storage(bytes);
  std::copy_n(
      static_cast<const char*>(storage->data()), std::min(bytes, storage->nbytes()),
      static_cast<char*>(host.mutable_data()));
  storage->set_data_ptr_noswap(own(std::move(host), storage->device().index()));
  storage->set_nbytes(bytes);
}

void note_access(const c10::Storage& storage, const Launch& launch, Access access) {
  std::lock_guard guard(state_mutex());
  // a graph's calls are ordered by its streams when it is replayed
  if (launch.number == 0 || storage.data_ptr().get_deleter() != &free_block) return;
  auto& accesses = static_cast<Block*>(storage.data_ptr().get_context())->accesses;
  for (const auto& other : accesses) {
    const bool conflicts = other.low < access.high && access.low < other.high && (other.writes || access.writes);
    if (!conflicts || other.stream == launch.stream || launch.before[other.stream] >= other.number) continue;
    TORCH_CHECK(
        false, "SIM race: ", access.op, " in ", describe(launch.stream), access.writes ? " writes" : " reads",
        " what ", other.op, " in ", describe(other.stream), other.writes ? " writes" : " reads",
        ": ", access.writes ? "write" : "read", " before the event");
  }
  const auto is_covered = [&](const Access& other) {
    return other.stream == launch.stream && other.low >= access.low && other.high <= access.high &&
        (access.writes || !other.writes);
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), is_covered), accesses.end());
  accesses.push_back(std::move(access));
}

c10::Allocator* device_allocator() { return &allocator; }

c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* data) {
  std::lock_guard guard(state_mutex());
  const auto* byte = static_cast<const char*>(data);
  const auto after = pinned.upper_bound(byte);
  return after != pinned.begin() && byte < std::prev(after)->first + std::max<size_t>(1, std::prev(after)->second);
}

} // namespace sim
