// The rules by which PyTorch's CUDA caching allocator cuts and keeps memory, over pages of the host. Knows no tensors.
//
// After c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13: sizes are rounded to 512 bytes; requests of at most 1 MiB are
// cut from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones get a segment rounded to 2 MiB; the
// smallest free block that is large enough serves; free neighbours are merged; only whole segments go back.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>

namespace pretend {

struct Pool;

// A stretch of addresses whose pages are mapped in units, under `expandable_segments`.
struct AddressRange {
  char* start;
  int64_t bytes;
  int64_t unit_bytes;
};

struct Block {
  int stream = 0;
  char* start = nullptr;
  int64_t bytes = 0;
  int64_t requested_bytes = 0;
  Pool* pool = nullptr;
  Block* before = nullptr;
  Block* after = nullptr;
  std::shared_ptr<AddressRange> range;  // null for a segment of its own
  bool in_use = false;                  // or freed, but still read by another stream
  bool is_mapped = true;
  std::set<int> other_streams;  // from record_stream
  // What the streams did with it, for `streams.h`: stream and place of the last write, place of each stream's last read.
  int writer = 0;
  int64_t written = 0;
  std::map<int, int64_t> reads;

  bool is_split() const { return before != nullptr || after != nullptr; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->start < b->start;
  }
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const {
    return a->stream != b->stream ? a->stream < b->stream : a->start < b->start;
  }
};

struct Pool {
  bool is_small;
  std::set<Block*, BySize> free;
  std::set<Block*, ByAddress> unmapped;
};

struct Count {
  int64_t current = 0, peak = 0, added = 0, removed = 0;
  void change(int64_t by) {
    current += by;
    if (current > peak) peak = current;
    (by > 0 ? added : removed) += by > 0 ? by : -by;
  }
};

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What an allocator has to ask of the streams.
struct Timeline {
  std::function<int64_t(int stream)> now;                     // how much has been asked of a stream
  std::function<bool(int stream, int64_t place)> has_passed;  // whether it has done that much
  std::function<void()> finish_all;                           // waits for the whole device
};

class CachingAllocator {
 public:
  CachingAllocator(int device, int64_t capacity_bytes, Timeline timeline);

  Block* allocate(int64_t bytes, int stream);  // throws OutOfMemory
  void free(Block* block);
  void empty_cache();

  // Settings, as a user has them.
  int64_t capacity_bytes;
  double fraction = 1.0;          // set_per_process_memory_fraction
  bool is_expandable = false;     // PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  int64_t elsewhere_bytes = 0;    // held by contexts and libraries outside of PyTorch
  int64_t fail_at = -1;           // place of the allocation that is refused, from 1; the cache is not asked
  int64_t allocations = 0;        // asked for so far
  int64_t refusals = 0;           // by fail_at or by the capacity

  int64_t allocated_bytes() const { return of("allocated_bytes").current; }
  int64_t reserved_bytes() const { return of("reserved_bytes").current; }
  int64_t peak_allocated_bytes() const { return of("allocated_bytes").peak; }
  int64_t peak_reserved_bytes() const { return of("reserved_bytes").peak; }
  std::string stats() const;  // the keys of torch.cuda.memory_stats, as JSON
  void reset_peaks();
  void reset_totals();

 private:
  Block* take_free(int64_t bytes, int stream, Pool& pool);
  Block* new_segment(int64_t bytes, int stream, Pool& pool);
  Block* expand(int64_t bytes, int stream, Pool& pool);
  Block* room_to_expand(int64_t bytes, int stream, Pool& pool);
  bool map(Block* block, int64_t bytes);
  void unmap(Block* block);
  bool is_allowed(int64_t bytes) const;    // by the fraction
  bool has_room_for(int64_t bytes) const;  // on the card
  void cut(Block* block, int64_t bytes);
  void release(Block* block);  // back among the free
  void merge(Block* into, Block* neighbour);
  void end_waits();
  void note(const char* name, const Pool& pool, int64_t by);
  const Count& of(const std::string& name) const { return counts_.at(name)[0]; }
  int64_t inactive_split(const Pool* pool, bool in_bytes) const;
  [[noreturn]] void refuse(int64_t bytes);

  int device_;
  Timeline timeline_;
  Pool small_{true, {}, {}}, large_{false, {}, {}};
  std::map<Block*, std::map<int, int64_t>> waiting_;  // freed blocks and the places other streams have to pass
  std::map<std::string, Count[3]> counts_;            // all, small_pool, large_pool
  int64_t retries_ = 0, ooms_ = 0, segments_made_ = 0, segments_freed_ = 0;
};

}  // namespace pretend
