// A CPU allocator that counts every byte PyTorch asks for, temporaries inside kernels included, in any thread, and
// knows what each is for. It hands each request to the allocator it replaced, and can refuse one with a genuine
// out-of-memory error. Blocks marked as host memory are counted apart and never refused.
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
constexpr size_t kHeaderBytes = 64;   // keeps the 64-byte alignment that vectorised kernels expect
constexpr uint8_t kPriority = 1;      // PyTorch's own allocator has 0; a refusal is reported by `memsafe_install`
constexpr int kComponents = 16;       // more than there are; the caller's numbers index the counts
constexpr int kUnmarked = -1;

// Stands before each block, so that a block can be freed, and its bytes given back, at any time after the counting.
struct Header {
  int64_t bytes;
  uint64_t session;
  void* context;
  c10::DeleterFnPtr deleter;
  int32_t component;
  bool on_host;
};
static_assert(sizeof(Header) <= kHeaderBytes);

// Marks of an earlier session are void, so that none can outlive its count.
struct Marks {
  uint64_t session = 0;
  int component = kUnmarked;
  bool on_host = false;
  bool is_marked = false;  // whether the thread has ever been told what it allocates for
};

// Bytes of the device and how they divide; the parts always sum to the total.
struct Split {
  int64_t total = 0;
  int64_t parts[kComponents] = {};
};

enum PeakKind { kPeak, kSpan, kHostPeak, kPeakKinds };
enum Verdict { kAdmitted, kChosen, kTooLarge };

std::mutex guard;  // over everything up to `unmarked`: a snapshot must be of one moment
Split device, host, peaks[kPeakKinds];
int64_t allocations = 0, refusals = 0, limit = kUnlimited, fail_at = 0;
int unmarked = 0;

std::atomic<uint64_t> session{0};
std::atomic<c10::Allocator*> wrapped{nullptr};
std::atomic<bool> others_on_host{false};  // whether threads without marks allocate host memory now
thread_local Marks thread_marks;

Marks& marks() {
  const uint64_t now = session.load();
  if (thread_marks.session != now) thread_marks = Marks{now, kUnmarked, false, false};
  return thread_marks;
}

bool on_host_now(const Marks& mark) { return mark.on_host || (!mark.is_marked && others_on_host.load()); }

void add(const Header& block, int64_t sign) {
  Split& arena = block.on_host ? host : device;
  arena.total += sign * block.bytes;
  arena.parts[block.component] += sign * block.bytes;
}

const Split& measured(int kind) { return kind == kHostPeak ? host : device; }

// A peak that still stands takes the newest division, so that a claim made right after an allocation is seen in it.
void note_peaks() {
  for (int kind = 0; kind < kPeakKinds; ++kind) {
    if (measured(kind).total >= peaks[kind].total) peaks[kind] = measured(kind);
  }
}

// Enters a block, or says why not; its peak is noted once the block really exists.
Verdict admit(Header& block, int64_t& held) {
  const std::lock_guard<std::mutex> lock(guard);
  block.session = session.load();
  if (block.component == kUnmarked) block.component = unmarked;
  held = device.total;
  if (!block.on_host) {
    const bool chosen = ++allocations == fail_at;
    if (chosen || held > limit - block.bytes) {
      ++refusals;
      return chosen ? kChosen : kTooLarge;
    }
  }
  add(block, 1);
  return kAdmitted;
}

void settle() {
  const std::lock_guard<std::mutex> lock(guard);
  note_peaks();
}

void withdraw(const Header& block) {
  const std::lock_guard<std::mutex> lock(guard);
  if (block.session == session.load()) add(block, -1);
}

void discard(const Header& block) {
  withdraw(block);
  if (block.deleter != nullptr) block.deleter(block.context);
}

void release(void* data) {
  if (data == nullptr) return;
  const Header block = *reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes);
  discard(block);
}

void release_adopted(void* header) {
  const std::unique_ptr<Header> block(static_cast<Header*>(header));
  discard(*block);
}

// The deleter tells whether a block is ours; nothing before a block of anybody else is ever read.
Header* header_of(const c10::DataPtr& block) {
  if (block.get_context() == nullptr) return nullptr;
  if (block.get_deleter() == &release) {
    return reinterpret_cast<Header*>(static_cast<char*>(block.get_context()) - kHeaderBytes);
  }
  return block.get_deleter() == &release_adopted ? static_cast<Header*>(block.get_context()) : nullptr;
}

Header* header_of(int64_t storage) {
  return header_of(reinterpret_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks());
}

bool is_counted(const Header* block) { return block != nullptr && block->session == session.load(); }

void move_to(Header& block, int component) {
  const std::lock_guard<std::mutex> lock(guard);
  add(block, -1);
  block.component = component;
  add(block, 1);
  note_peaks();
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (count == 0) return {nullptr, nullptr, &release, cpu};
    const Marks mark = marks();
    Header header{static_cast<int64_t>(count), 0, nullptr, nullptr, mark.component, on_host_now(mark)};
    int64_t held = 0;
    const Verdict verdict = admit(header, held);
    TORCH_CHECK_WITH(OutOfMemoryError, verdict == kAdmitted, "Simulated device out of memory. Tried to allocate ", count,
                     " bytes. ", held, " bytes are live",
                     verdict == kChosen ? "; this allocation was chosen to fail." : "; the capacity would be passed.");
    try {
      c10::DataPtr block = wrapped.load()->allocate(count + kHeaderBytes);
      auto* data = static_cast<char*>(block.get()) + kHeaderBytes;
      header.deleter = block.get_deleter();
      header.context = block.release_context();
      new (data - kHeaderBytes) Header(header);
      settle();
      return {data, data, &release, cpu};
    } catch (...) {
      withdraw(header);
      throw;
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

CountingAllocator* instance() {
  static auto* allocator = new CountingAllocator();  // never freed: storages keep a pointer to their allocator
  return allocator;
}

void copy_out(const Split& split, int64_t* out) {
  out[0] = split.total;
  std::copy(split.parts, split.parts + kComponents, out + 1);
}

// A child process made while another thread counts must not inherit a locked guard.
[[maybe_unused]] const int kForkSafe =
    pthread_atfork([] { guard.lock(); }, [] { guard.unlock(); }, [] { guard.unlock(); });

}  // namespace

// Splits are written as kComponents + 1 numbers: the total, then the parts. Storages are addresses of StorageImpl.
extern "C" {
int memsafe_components() { return kComponents; }
// Starts a new session, in which only blocks made from now on count; returns 0, or 1 if PyTorch refused the allocator.
int memsafe_install(int component_of_unmarked) {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current != instance()) wrapped.store(current);
  {
    const std::lock_guard<std::mutex> lock(guard);
    session.fetch_add(1);
    device = host = Split{};
    std::fill(peaks, peaks + kPeakKinds, Split{});
    allocations = refusals = fail_at = 0;
    limit = kUnlimited;
    unmarked = component_of_unmarked;
  }
  c10::SetCPUAllocator(instance(), kPriority);
  return c10::GetCPUAllocator() == instance() ? 0 : 1;
}
// Blocks handed out stay valid; a storage that was made under the allocator and grows later still asks it, unlimited.
void memsafe_uninstall() {
  {
    const std::lock_guard<std::mutex> lock(guard);
    limit = kUnlimited;
    fail_at = 0;
  }
  c10::SetCPUAllocator(wrapped.load(), kPriority);
}
// Writes allocations and refusals, then the device's split and the host's, all of one moment.
void memsafe_read(int64_t* out) {
  const std::lock_guard<std::mutex> lock(guard);
  out[0] = allocations;
  out[1] = refusals;
  copy_out(device, out + 2);
  copy_out(host, out + 3 + kComponents);
}
void memsafe_read_peak(int kind, int64_t* out) {
  const std::lock_guard<std::mutex> lock(guard);
  copy_out(peaks[kind], out);
}
void memsafe_restart_peak(int kind) {
  const std::lock_guard<std::mutex> lock(guard);
  peaks[kind] = measured(kind);
}
void memsafe_set_limit(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(guard);
  limit = bytes < 0 ? kUnlimited : bytes;
}
void memsafe_set_fail_at(int64_t allocation) {
  const std::lock_guard<std::mutex> lock(guard);
  fail_at = allocation;
}
// The component of blocks made without a mark, in any thread; gives the one before.
int memsafe_set_unmarked(int component) {
  const std::lock_guard<std::mutex> lock(guard);
  return std::exchange(unmarked, component);
}
// Marks of this thread; each gives the one before. A negative component takes the mark away.
int memsafe_mark_component(int component) {
  marks().is_marked = true;
  return std::exchange(marks().component, component);
}
int memsafe_mark_host(int on_host) {
  marks().is_marked = true;
  return std::exchange(marks().on_host, on_host != 0);
}
// The mark of all threads that never had one; gives the one before.
int memsafe_mark_others(int on_host) { return others_on_host.exchange(on_host != 0); }

void memsafe_claim(int component, const int64_t* storages, int64_t count) {
  for (const int64_t* storage = storages; storage != storages + count; ++storage) {
    Header* block = header_of(*storage);
    if (is_counted(block)) move_to(*block, component);
  }
}
// Counts a storage from now on until it dies; returns a verdict, and the bytes that were held if it was refused.
int memsafe_hold(int component, int64_t storage, int64_t* held) {
  auto* impl = reinterpret_cast<c10::StorageImpl*>(storage);
  c10::DataPtr& data = impl->_mutable_data_ptr_no_checks();
  if (data.get() == nullptr || !data.device().is_cpu() || c10::impl::cow::is_cow_data_ptr(data)) return kAdmitted;
  Header* block = header_of(data);
  if (is_counted(block)) {
    move_to(*block, component);
    return kAdmitted;
  }
  const int64_t bytes = block != nullptr ? block->bytes : static_cast<int64_t>(impl->nbytes());
  Header entered{bytes, 0, nullptr, nullptr, component, false};
  const Verdict verdict = admit(entered, *held);
  if (verdict != kAdmitted) return verdict;
  if (block != nullptr) {
    block->session = entered.session;
    block->component = component;
    block->on_host = false;
  } else {
    entered.deleter = data.get_deleter();
    void* address = data.get();
    const c10::Device cpu = data.device();
    entered.context = data.release_context();
    impl->set_data_ptr_noswap({address, new Header(entered), &release_adopted, cpu});
  }
  settle();
  return kAdmitted;
}
int memsafe_is_on_host(int64_t storage) {
  const Header* block = header_of(storage);
  return is_counted(block) && block->on_host ? 1 : 0;
}
}
