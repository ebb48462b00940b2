// What Python calls through ctypes; nothing here raises.
#include <cstring>
#include <sstream>

#include "device.h"

using namespace pretend;

namespace {

thread_local std::string text;  // of the thread's last answer

const char* answer(const std::map<std::string, int64_t>& counts) {
  std::ostringstream json;
  json << '{';
  const char* comma = "";
  for (const auto& [name, times] : counts) {
    json << comma << '"' << name << "\": " << times;
    comma = ", ";
  }
  json << '}';
  text = json.str();
  return text.c_str();
}

}  // namespace

extern "C" {

int pretend_devices() { return static_cast<int>(devices().size()); }

// Memory. A device of -1 is the current one.
int64_t pretend_allocated(int index) { const Locked locked(lock()); return device(index).allocator.allocated_bytes(); }
int64_t pretend_reserved(int index) { const Locked locked(lock()); return device(index).allocator.reserved_bytes(); }
int64_t pretend_peak_allocated(int index) { const Locked locked(lock()); return device(index).allocator.peak_allocated_bytes(); }
int64_t pretend_peak_reserved(int index) { const Locked locked(lock()); return device(index).allocator.peak_reserved_bytes(); }
int64_t pretend_allocations(int index) { const Locked locked(lock()); return device(index).allocator.allocations; }
int64_t pretend_refusals(int index) { const Locked locked(lock()); return device(index).allocator.refusals; }
int64_t pretend_capacity(int index) { const Locked locked(lock()); return device(index).allocator.capacity_bytes; }
int64_t pretend_elsewhere(int index) { const Locked locked(lock()); return device(index).allocator.elsewhere_bytes; }
const char* pretend_memory_stats(int index) {
  const Locked locked(lock());
  text = device(index).allocator.stats();
  return text.c_str();
}
void pretend_empty_cache(int index) { const Locked locked(lock()); device(index).allocator.empty_cache(); }
void pretend_reset_peaks(int index) { const Locked locked(lock()); device(index).allocator.reset_peaks(); }
void pretend_reset_totals(int index) { const Locked locked(lock()); device(index).allocator.reset_totals(); }

void pretend_set_capacity(int index, int64_t bytes) { const Locked locked(lock()); device(index).allocator.capacity_bytes = bytes; }
void pretend_set_elsewhere(int index, int64_t bytes) { const Locked locked(lock()); device(index).allocator.elsewhere_bytes = bytes; }
void pretend_set_fraction(int index, double fraction) { const Locked locked(lock()); device(index).allocator.fraction = fraction; }
void pretend_set_expandable(int index, int is) { const Locked locked(lock()); device(index).allocator.is_expandable = is != 0; }
void pretend_fail_at(int index, int64_t place) { const Locked locked(lock()); device(index).allocator.fail_at = place; }

// Counts.
const char* pretend_operators() { const Locked locked(lock()); return answer(operators()); }
const char* pretend_transfers() { const Locked locked(lock()); return answer(transfers()); }
void pretend_reset_counts() {
  const Locked locked(lock());
  operators().clear();
  transfers().clear();
}

void pretend_draw_from_host(int draws) { draws_from_host() = draws != 0; }

// Random numbers: the state as bytes; its length where `to` is null.
int64_t pretend_random_state(int index, char* to) {
  const at::Tensor state = device(index).generator.get_state();
  if (to != nullptr) std::memcpy(to, state.const_data_ptr(), state.nbytes());
  return static_cast<int64_t>(state.nbytes());
}
void pretend_set_random_state(int index, const char* from, int64_t bytes) {
  at::Tensor state = device(index).generator.get_state();
  if (bytes == static_cast<int64_t>(state.nbytes())) std::memcpy(state.mutable_data_ptr(), from, bytes);
  device(index).generator.set_state(state);
}
void pretend_seed(int index, uint64_t seed) { device(index).generator.set_current_seed(seed); }

}  // extern "C"
