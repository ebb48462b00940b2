// What torch asks of a CUDA device apart from operators: memory, guards, streams, events, generators, hooks.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>

namespace pretend {
namespace {

constexpr int64_t kDefaultCapacity = int64_t{8} << 30;
constexpr auto kCuda = c10::DeviceType::CUDA;

thread_local int this_threads_device = 0;
thread_local std::map<int, int> this_threads_streams;  // by device

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

// ---------------------------------------------------------------- random numbers

// Draws the CPU's numbers, under the device's name: the operators that ask for a CUDA generator take no other.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::Device device, at::Generator numbers)
      : c10::GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::CUDA)), numbers(std::move(numbers)) {}
  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { numbers.set_offset(offset); }
  uint64_t get_offset() const override { return numbers.get_offset(); }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_state(const c10::TensorImpl& state) override { numbers.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device(), numbers.clone()); }

  at::Generator numbers;
};

at::Generator make_generator(c10::Device device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

// ---------------------------------------------------------------- memory

void give_back(void* context) {
  const Locked locked(lock());
  std::unique_ptr<Held> held(static_cast<Held*>(context));
  held->device->streams.forget(*held->block, held->block->other_streams);
  held->device->allocator.free(held->block);
}

void nothing(void*) {}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const Locked locked(lock());
    Device& on = device(-1);
    if (bytes == 0) return {nullptr, nullptr, &nothing, on.torch_device()};
    const int stream = current_stream(on.index);
    on.streams.advance(stream);  // what is still asked of this stream may concern the bytes that are given out again
    Block* block = nullptr;
    try {
      block = on.allocator.allocate(static_cast<int64_t>(bytes), stream);
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    block->writer = stream;
    block->written = on.streams.now(stream);
    block->reads.clear();
    fill_with_garbage(block->start, block->bytes);
    return {block->start, new Held{&on, block}, &give_back, on.torch_device()};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} the_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = std::aligned_alloc(512, (bytes + 512) / 512 * 512);
    TORCH_CHECK(start != nullptr, "no host memory for ", bytes, " pinned bytes");
    const Locked locked(lock());
    ranges()[static_cast<char*>(start)] = bytes;
    return {start, start, &give_up, c10::Device(c10::DeviceType::CPU)};
  }
  static void give_up(void* start) {
    const Locked locked(lock());
    ranges().erase(static_cast<char*>(start));
    std::free(start);
  }
  static std::map<char*, size_t>& ranges() {
    static auto* each = new std::map<char*, size_t>;
    return *each;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_up; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} the_pinned_allocator;

// ---------------------------------------------------------------- devices, streams, events

struct DeviceEvent {
  int device;
  Event event;
};

c10::Stream torch_stream(int device_index, int stream) {
  return c10::Stream(c10::Stream::UNSAFE, device(device_index).torch_device(), stream);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device(-1).torch_device(); }
  void setDevice(c10::Device to) const override {
    if (to.has_index()) set_current_device(to.index());
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) this_threads_device = to.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices().size()); }

  c10::Stream getStream(c10::Device of) const override {
    return torch_stream(device(of.index()).index, current_stream(device(of.index()).index));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return torch_stream(of.index(), 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    const Locked locked(lock());
    return torch_stream(of.index(), device(of.index()).streams.make());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = getStream(to.device());
    this_threads_streams[to.device_index()] = static_cast<int>(to.id());
    return before;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const Locked locked(lock());
    count(transfers(), "wait for a stream");
    device(stream.device_index()).streams.wait_for(static_cast<int>(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {  // a poll that succeeds is a wait that has ended
    synchronizeStream(stream);
    return true;
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const Locked locked(lock());
    count(transfers(), "wait for a device");
    device(index).streams.wait_for_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const Locked locked(lock());
    if (data.get_deleter() != &give_back) return;
    Block& block = *static_cast<Held*>(data.get_context())->block;
    if (static_cast<int>(stream.id()) != block.stream) block.other_streams.insert(static_cast<int>(stream.id()));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const Locked locked(lock());
    if (*event == nullptr) *event = new DeviceEvent;
    auto* made = static_cast<DeviceEvent*>(*event);
    made->device = stream.device_index();
    made->event = device(stream.device_index()).streams.record(static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const Locked locked(lock());
    if (event == nullptr) return;
    auto* recorded = static_cast<DeviceEvent*>(event);
    Streams& streams = device(recorded->device).streams;
    if (stream.device_index() == recorded->device) streams.wait(static_cast<int>(stream.id()), recorded->event);
    else streams.wait_for(recorded->event);  // across devices
  }
  void synchronizeEvent(void* event) const override {
    const Locked locked(lock());
    if (event == nullptr) return;
    count(transfers(), "wait for an event");
    auto* recorded = static_cast<DeviceEvent*>(event);
    device(recorded->device).streams.wait_for(recorded->event);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<DeviceEvent*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks final : at::CUDAHooksInterface {  // the name by which torch asks for them
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(devices().size()); }
  int getNumGPUs() const override { return static_cast<int>(devices().size()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(this_threads_device); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Device getDeviceFromPtr(void*) const override { return device(-1).torch_device(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &the_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return device(index).generator; }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return make_generator(device(index).torch_device()); }
  void deviceSynchronize(c10::DeviceIndex index) const override { Guard().synchronizeDevice(index); }
};

const bool registered = [] {
  c10::SetAllocator(kCuda, &the_allocator, 9);
  return true;
}();

}  // namespace

using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

Device::Device(int index, int64_t capacity_bytes)
    : index(index),
      allocator(index, capacity_bytes,
                {[this](int stream) { return streams.now(stream); },
                 [this](int stream, int64_t place) { return streams.has_passed(stream, place); },
                 [this] { streams.wait_for_all(); }}),
      generator(make_generator(torch_device())) {}

std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

std::vector<std::unique_ptr<Device>>& devices() {
  static auto* each = [] {
    auto* made = new std::vector<std::unique_ptr<Device>>;
    const int64_t bytes = from_environment("PRETEND_DEVICE_BYTES", kDefaultCapacity);
    for (int i = 0; i < from_environment("PRETEND_DEVICES", 2); ++i) made->push_back(std::make_unique<Device>(i, bytes));
    return made;
  }();
  return *each;
}

int current_device() { return this_threads_device; }
Device& device(int index) { return *devices().at(index < 0 ? this_threads_device : index); }
int current_stream(int device) { return this_threads_streams[device]; }
c10::Allocator* device_allocator() { return &the_allocator; }

void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < static_cast<int>(devices().size()),
              "CUDA error: invalid device ordinal (", index, " of ", devices().size(), " pretend devices)");
  this_threads_device = index;
}

bool is_pinned(const void* address) {
  const Locked locked(lock());
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto after = PinnedAllocator::ranges().upper_bound(at);
  if (after == PinnedAllocator::ranges().begin()) return false;
  --after;
  return at < after->first + after->second;
}

Held* held(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &give_back ? static_cast<Held*>(data.get_context()) : nullptr;
}

at::Generator host_generator(const at::Generator& generator) {
  auto* of_device = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(of_device != nullptr, "Expected a 'cuda' device type for generator but found 'cpu'");
  return of_device->numbers;
}

bool& draws_from_host() {
  static bool draws = false;
  return draws;
}

std::map<std::string, int64_t>& operators() {
  static auto* counts = new std::map<std::string, int64_t>;
  return *counts;
}

std::map<std::string, int64_t>& transfers() {
  static auto* counts = new std::map<std::string, int64_t>;
  return *counts;
}

void count(std::map<std::string, int64_t>& counts, const std::string& what) {
  const Locked locked(lock());
  ++counts[what];
}

}  // namespace pretend
