// What torch asks of a device: its guard, its hooks, its generators.
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 7
#define SIM_OLD_GENERATORS
#include <ATen/core/GeneratorForPrivateuseone.h>
#endif

#include "generators.h"

namespace sim {

namespace {

// Whether asking for a stream may raise; in older torch it may not.
constexpr bool kRaises =
    !noexcept(std::declval<const c10::impl::DeviceGuardImplInterface&>().getStream(std::declval<c10::Device>()));

// What CUDA's events do to the thread's own device, which torch's guard leaves to them or goes back to: whichever event
// it is, the device gets a context.
void use_own() { use(current_device()); }

// Methods that older torch lacks are not marked as overriding.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kKind, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const noexcept(!kRaises) override {
    return current_stream(device.index(), kRaises);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(device.index()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept(!kRaises) override {
    return exchange_stream(stream, kRaises);
  }
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const Index, const c10::EventFlag) const override {
    record_event(event, stream);
    use_own();
  }
  void block(void* event, const c10::Stream& stream) const override { block_on_event(event, stream); }
  bool queryEvent(void* event) const override {
    use_own();
    return query_event(event);
  }
  Index deviceCount() const noexcept override { return device_count(); }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream); }
  bool isStreamCapturing(const c10::Stream& stream) const { return capture_of(stream) != nullptr; }
  void synchronizeEvent(void* event) const override {
    use_own();
    synchronize_event(event);
  }
  void synchronizeDevice(const Index device) const { synchronize_device(device); }
  double elapsedTime(void* before, void* after, const Index) const override {
    use_own();
    return elapsed_ms(before, after);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(Index device) {
    device_ = {kKind, device};
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { initialize(); }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return device_count() > 0; }
  bool hasPrimaryContext(Index device) const override { return has_context(device); }
  Index deviceCount() const override { return device_count(); }
  Index getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(Index device) const override { set_current_device(device); }
  Index exchangeDevice(Index device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  Index maybeExchangeDevice(Index device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return {kKind, current_device()}; }
  const at::Generator& getDefaultGenerator(Index device) const override { return default_generator(device); }
  at::Generator getNewGenerator(Index device) const { return at::make_generator<Generator>(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow(storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool registered = [] {
  c10::SetAllocator(kKind, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

#ifdef SIM_OLD_GENERATORS
at::Generator make(Index device) { return at::make_generator<Generator>(device); }
REGISTER_GENERATOR_PRIVATEUSE1(make)
#endif

} // namespace

at::Generator& default_generator(Index device) {
  static auto* generators = new std::map<Index, at::Generator>();
  std::lock_guard guard(state_mutex());
  if (device < 0) device = current_device();
  return generators->try_emplace(device, at::make_generator<Generator>(device)).first->second;
}

} // namespace sim
