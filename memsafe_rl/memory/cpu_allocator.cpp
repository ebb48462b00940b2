// A CPU allocator that counts every byte PyTorch asks for, temporaries inside kernels included, in any thread.
// It hands each request to the allocator it replaced, and can refuse one with a genuine out-of-memory error.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <new>

namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
constexpr size_t kHeaderBytes = 64;   // keeps the 64-byte alignment that vectorised kernels expect
constexpr uint8_t kPriority = 1;      // PyTorch's own allocator has 0; a refusal is reported by `memsafe_install`

std::atomic<int64_t> live{0}, peak{0}, allocations{0}, refusals{0};
std::atomic<int64_t> limit{kUnlimited}, fail_at{0};
std::atomic<uint64_t> session{0};
std::atomic<c10::Allocator*> wrapped{nullptr};

// Stands before each block, so that a block can be freed, and its bytes given back, at any time after the counting.
struct Header {
  int64_t bytes;
  uint64_t session;
  void* context;
  c10::DeleterFnPtr deleter;
};
static_assert(sizeof(Header) <= kHeaderBytes);

void reserve(int64_t bytes) {
  const bool chosen = allocations.fetch_add(1) + 1 == fail_at.load();
  int64_t held = live.load();
  do {
    if (chosen || held + bytes > limit.load()) {
      refusals.fetch_add(1);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "Simulated device out of memory. Tried to allocate ", bytes,
                       " bytes. ", held, " bytes are live",
                       chosen ? "; this allocation was chosen to fail." : "; the capacity would be passed.");
    }
  } while (!live.compare_exchange_weak(held, held + bytes));
  int64_t highest = peak.load();
  while (highest < held + bytes && !peak.compare_exchange_weak(highest, held + bytes)) {
  }
}

void release(void* data) {
  if (data == nullptr) return;
  auto* header = reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes);
  const Header block = *header;
  if (block.session == session.load()) live.fetch_sub(block.bytes);
  if (block.deleter != nullptr) block.deleter(block.context);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (count == 0) return {nullptr, nullptr, &release, cpu};
    const auto bytes = static_cast<int64_t>(count);
    const uint64_t now = session.load();
    reserve(bytes);
    try {
      c10::DataPtr block = wrapped.load()->allocate(count + kHeaderBytes);
      auto* data = static_cast<char*>(block.get()) + kHeaderBytes;
      const c10::DeleterFnPtr deleter = block.get_deleter();
      new (block.get()) Header{bytes, now, block.release_context(), deleter};
      return {data, data, &release, cpu};
    } catch (...) {
      live.fetch_sub(bytes);
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

}  // namespace

extern "C" {
// Starts a new session, in which only blocks made from now on count; returns 0, or 1 if PyTorch refused the allocator.
int memsafe_install() {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current != instance()) wrapped.store(current);
  session.fetch_add(1);
  for (auto* counter : {&live, &peak, &allocations, &refusals, &fail_at}) counter->store(0);
  limit.store(kUnlimited);
  c10::SetCPUAllocator(instance(), kPriority);
  return c10::GetCPUAllocator() == instance() ? 0 : 1;
}
// Blocks handed out stay valid; a storage that was made under the allocator and grows later still asks it, unlimited.
void memsafe_uninstall() {
  limit.store(kUnlimited);
  fail_at.store(0);
  c10::SetCPUAllocator(wrapped.load(), kPriority);
}
int64_t memsafe_live() { return live.load(); }
int64_t memsafe_peak() { return peak.load(); }
int64_t memsafe_allocations() { return allocations.load(); }
int64_t memsafe_refusals() { return refusals.load(); }
void memsafe_reset_peak() { peak.store(live.load()); }
void memsafe_set_limit(int64_t bytes) { limit.store(bytes < 0 ? kUnlimited : bytes); }
void memsafe_set_fail_at(int64_t allocation) { fail_at.store(allocation); }
}
