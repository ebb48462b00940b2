#include "caching_allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <sstream>
#include <vector>

namespace pretend {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kBlock = 512;               // sizes are multiples of it
constexpr int64_t kSmallRequest = kMiB;       // the largest of the small pool
constexpr int64_t kSmallSegment = 2 * kMiB;   // what the small pool takes from the driver
constexpr int64_t kLargeSegment = 20 * kMiB;  // what requests under `kOwnSegment` take
constexpr int64_t kOwnSegment = 10 * kMiB;    // from here on, a request gets a segment of its own size
constexpr int64_t kSegmentStep = 2 * kMiB;    // rounded up to this

int64_t up(int64_t bytes, int64_t step) { return (bytes + step - 1) / step * step; }

int64_t segment_bytes(int64_t bytes) {
  if (bytes <= kSmallRequest) return kSmallSegment;
  return bytes < kOwnSegment ? kLargeSegment : up(bytes, kSegmentStep);
}

bool leaves_a_block(const Block& block, int64_t bytes, bool is_expandable) {
  const int64_t rest = block.bytes - bytes;
  return block.pool->is_small || is_expandable ? rest >= kBlock : rest > kSmallRequest;
}

// How large a free block may become: the end of an expandable segment counts with the addresses behind it.
int64_t room(const Block* block) {
  return block->bytes + (block->after && !block->after->is_mapped ? block->after->bytes : 0);
}

// Later segments lie higher, so that which of two equal blocks serves, and with it every run, is always the same.
char* pages(int64_t bytes) {
  static char* next = reinterpret_cast<char*>(int64_t{1} << 44);
  void* start = mmap(next, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) throw std::runtime_error("the pretend device found no address space on the host");
  next = static_cast<char*>(start) + bytes;
  return static_cast<char*>(start);
}

bool is_idle(const Block* block) { return block != nullptr && !block->in_use; }

}  // namespace

CachingAllocator::CachingAllocator(int device, int64_t capacity_bytes, Timeline timeline)
    : capacity_bytes(capacity_bytes), device_(device), timeline_(std::move(timeline)) {
  for (auto name : {"allocation", "segment", "active", "allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"})
    counts_[name];
}

Block* CachingAllocator::allocate(int64_t requested, int stream) {
  end_waits();
  if (++allocations == fail_at) refuse(requested);
  const int64_t bytes = up(requested, kBlock);
  Pool& pool = bytes <= kSmallRequest ? small_ : large_;
  Block* block = take_free(bytes, stream, pool);
  if (block == nullptr) block = new_segment(bytes, stream, pool);
  if (block == nullptr) {
    ++retries_;
    empty_cache();
    block = new_segment(bytes, stream, pool);
  }
  if (block == nullptr) refuse(requested);
  if (leaves_a_block(*block, bytes, is_expandable)) cut(block, bytes);
  block->in_use = true;
  block->requested_bytes = requested;
  for (auto name : {"allocation", "active"}) note(name, pool, 1);
  for (auto name : {"allocated_bytes", "active_bytes"}) note(name, pool, block->bytes);
  note("requested_bytes", pool, requested);
  return block;
}

void CachingAllocator::free(Block* block) {
  note("allocation", *block->pool, -1);
  note("allocated_bytes", *block->pool, -block->bytes);
  note("requested_bytes", *block->pool, -block->requested_bytes);
  if (block->other_streams.empty()) return release(block);
  for (int stream : block->other_streams) waiting_[block][stream] = timeline_.now(stream);
  block->other_streams.clear();
}

// A freed block serves again once every stream it was lent to has done what was asked of it at the free.
void CachingAllocator::end_waits() {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const auto& places = it->second;
    if (std::all_of(places.begin(), places.end(), [&](auto& at) { return timeline_.has_passed(at.first, at.second); })) {
      release(it->first);
      it = waiting_.erase(it);
    } else {
      ++it;
    }
  }
}

void CachingAllocator::release(Block* block) {
  note("active", *block->pool, -1);
  note("active_bytes", *block->pool, -block->bytes);
  block->in_use = false;
  merge(block, block->before);
  merge(block, block->after);
  block->pool->free.insert(block);
}

void CachingAllocator::merge(Block* into, Block* neighbour) {
  if (!is_idle(neighbour) || neighbour->is_mapped != into->is_mapped) return;
  if (neighbour->is_mapped) into->pool->free.erase(neighbour);
  else into->pool->unmapped.erase(neighbour);
  if (neighbour == into->before) {
    into->start = neighbour->start;
    into->before = neighbour->before;
    if (into->before) into->before->after = into;
  } else {
    into->after = neighbour->after;
    if (into->after) into->after->before = into;
  }
  into->bytes += neighbour->bytes;
  delete neighbour;
}

// Best fit: the smallest free block of the stream that is large enough, at the lowest address. While segments may expand,
// what may grow serves after larger blocks that may not; later, blocks of expandable segments serve no more.
Block* CachingAllocator::take_free(int64_t bytes, int stream, Pool& pool) {
  Block wanted;
  wanted.stream = stream;
  wanted.bytes = bytes;
  auto found = pool.free.lower_bound(&wanted);
  auto serves = [&](auto at) { return at != pool.free.end() && (*at)->stream == stream; };
  if (is_expandable) {
    while (serves(found) && (*found)->range && serves(std::next(found)) && room(*std::next(found)) < room(*found)) ++found;
  } else {
    while (serves(found) && (*found)->range) ++found;
  }
  if (!serves(found)) return nullptr;
  Block* block = *found;
  pool.free.erase(found);
  return block;
}

void CachingAllocator::cut(Block* block, int64_t bytes) {
  Block* rest = new Block(*block);
  rest->start += bytes;
  rest->bytes -= bytes;
  rest->before = block;
  if (rest->after) rest->after->before = rest;
  block->bytes = bytes;
  block->after = rest;
  (rest->is_mapped ? (void)block->pool->free.insert(rest) : (void)block->pool->unmapped.insert(rest));
}

bool CachingAllocator::is_allowed(int64_t bytes) const {
  return fraction >= 1 || reserved_bytes() + bytes <= static_cast<int64_t>(fraction * static_cast<double>(capacity_bytes));
}

bool CachingAllocator::has_room_for(int64_t bytes) const {
  return reserved_bytes() + bytes + elsewhere_bytes <= capacity_bytes;
}

Block* CachingAllocator::new_segment(int64_t requested, int stream, Pool& pool) {
  const int64_t bytes = segment_bytes(requested);
  if (!is_allowed(bytes)) return nullptr;  // the same segment where less is mapped, or more: pages only ask the card
  if (is_expandable) return expand(requested, stream, pool);
  if (!has_room_for(bytes)) return nullptr;
  auto* block = new Block;
  block->stream = stream;
  block->start = pages(bytes);
  block->bytes = bytes;
  block->pool = &pool;
  note("segment", pool, 1);
  note("reserved_bytes", pool, bytes);
  ++segments_made_;
  return block;
}

// The first stretch, by address, of free and unmapped blocks that is long enough; else a fresh range of addresses.
Block* CachingAllocator::room_to_expand(int64_t bytes, int stream, Pool& pool) {
  for (Block* first : pool.unmapped) {
    if (first->stream != stream) continue;
    if (is_idle(first->before)) first = first->before;
    int64_t room = 0;
    for (Block* b = first; room < bytes && is_idle(b); b = b->after) room += b->bytes;
    if (room >= bytes) return first;
  }
  const int64_t unit = pool.is_small ? kSmallSegment : kLargeSegment;
  const int64_t room = up(capacity_bytes + capacity_bytes / 8, unit);
  auto* block = new Block;
  block->stream = stream;
  block->start = pages(room);
  block->bytes = room;
  block->pool = &pool;
  block->range = std::make_shared<AddressRange>(AddressRange{block->start, room, unit});
  block->is_mapped = false;
  pool.unmapped.insert(block);
  return block;
}

Block* CachingAllocator::expand(int64_t bytes, int stream, Pool& pool) {
  Block* block = room_to_expand(bytes, stream, pool);
  if (!block->is_mapped && !map(block, std::min(bytes, block->bytes))) return nullptr;
  while (block->bytes < bytes) {
    Block* next = block->after;
    if (!map(next, std::min(bytes - block->bytes, next->bytes))) return nullptr;
    block = next;  // merged with what came before it
  }
  pool.free.erase(block);
  return block;
}

bool CachingAllocator::map(Block* block, int64_t bytes) {
  const int64_t mapped = std::min(up(bytes, block->range->unit_bytes), block->bytes);
  if (!has_room_for(mapped)) return false;
  Pool& pool = *block->pool;
  pool.unmapped.erase(block);
  if (mapped < block->bytes) cut(block, mapped);
  block->is_mapped = true;
  merge(block, block->before);
  merge(block, block->after);
  pool.free.insert(block);
  note("segment", pool, mapped / block->range->unit_bytes);
  note("reserved_bytes", pool, mapped);
  return true;
}

// Gives the whole units of a free block back; what is left of it before and after them stays mapped.
void CachingAllocator::unmap(Block* block) {
  const AddressRange& range = *block->range;
  const int64_t from = up(block->start - range.start, range.unit_bytes);
  const int64_t to = (block->start + block->bytes - range.start) / range.unit_bytes * range.unit_bytes;
  if (from >= to) return;
  Pool& pool = *block->pool;
  pool.free.erase(block);
  if (const int64_t lead = range.start + from - block->start; lead > 0) {
    cut(block, lead);
    Block* rest = block->after;
    pool.free.insert(block);
    pool.free.erase(rest);
    block = rest;
  }
  if (block->bytes > to - from) cut(block, to - from);
  madvise(block->start, to - from, MADV_DONTNEED);
  block->is_mapped = false;
  merge(block, block->before);
  merge(block, block->after);
  pool.unmapped.insert(block);
  note("segment", pool, -(to - from) / range.unit_bytes);
  note("reserved_bytes", pool, from - to);
}

void CachingAllocator::empty_cache() {
  timeline_.finish_all();
  end_waits();
  for (Pool* pool : {&small_, &large_}) {
    const std::vector<Block*> blocks(pool->free.begin(), pool->free.end());
    for (Block* block : blocks) {
      if (block->range) {
        unmap(block);
      } else if (!block->is_split()) {
        pool->free.erase(block);
        munmap(block->start, block->bytes);
        note("segment", *pool, -1);
        note("reserved_bytes", *pool, -block->bytes);
        ++segments_freed_;
        delete block;
      }
    }
  }
}

void CachingAllocator::refuse(int64_t bytes) {
  ++refusals;
  ++ooms_;
  std::ostringstream text;
  text.setf(std::ios::fixed);
  text.precision(2);
  auto mib = [](int64_t b) { return static_cast<double>(b) / kMiB; };
  text << "CUDA out of memory. Tried to allocate " << mib(bytes) << " MiB. GPU " << device_ << " has a total capacity of "
       << mib(capacity_bytes) << " MiB of which " << mib(capacity_bytes - elsewhere_bytes - reserved_bytes())
       << " MiB is free. Of the allocated memory " << mib(allocated_bytes()) << " MiB is allocated by PyTorch, and "
       << mib(reserved_bytes() - allocated_bytes()) << " MiB is reserved by PyTorch but unallocated. (pretend device)";
  throw OutOfMemory(text.str());
}

void CachingAllocator::note(const char* name, const Pool& pool, int64_t by) {
  Count* count = counts_.at(name);
  count[0].change(by);
  count[pool.is_small ? 1 : 2].change(by);
}

int64_t CachingAllocator::inactive_split(const Pool* pool, bool in_bytes) const {
  int64_t total = 0;
  for (const Pool* each : {&small_, &large_})
    for (const Block* block : each->free)
      if ((pool == nullptr || pool == each) && block->is_split() && !block->range) total += in_bytes ? block->bytes : 1;
  return total;
}

std::string CachingAllocator::stats() const {
  const char* const pools[] = {"all", "small_pool", "large_pool"};
  std::ostringstream text;
  text << '{';
  for (const auto& [name, count] : counts_)
    for (int p = 0; p < 3; ++p)
      text << '"' << name << '.' << pools[p] << ".current\": " << count[p].current << ", \"" << name << '.' << pools[p]
           << ".peak\": " << count[p].peak << ", \"" << name << '.' << pools[p] << ".allocated\": " << count[p].added
           << ", \"" << name << '.' << pools[p] << ".freed\": " << count[p].removed << ", ";
  const Pool* const which[] = {nullptr, &small_, &large_};
  for (int p = 0; p < 3; ++p)
    text << "\"inactive_split." << pools[p] << ".current\": " << inactive_split(which[p], false)
         << ", \"inactive_split_bytes." << pools[p] << ".current\": " << inactive_split(which[p], true) << ", ";
  text << "\"num_alloc_retries\": " << retries_ << ", \"num_ooms\": " << ooms_ << ", \"num_device_alloc\": "
       << segments_made_ << ", \"num_device_free\": " << segments_freed_ << ", \"max_split_size\": -1}";
  return text.str();
}

void CachingAllocator::reset_peaks() {
  for (auto& [name, count] : counts_)
    for (Count& each : count) each.peak = each.current;
}

void CachingAllocator::reset_totals() {
  for (auto& [name, count] : counts_)
    for (Count& each : count) each.added = each.removed = 0;
  retries_ = ooms_ = 0;
}

}  // namespace pretend
