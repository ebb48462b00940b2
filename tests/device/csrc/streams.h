// Streams and events of one pretend device, and copies that land only when somebody waits. Knows no tensors.
//
// Kernels run at once, in the order in which they are asked for; what a card does later is copies between pinned host
// memory and the device. Such a copy is kept in its stream: the device's side of it is done when the stream goes on, the
// host's side when the host waits for the stream or for an event behind it. Until then its target holds garbage.
// Clocks (how much of every stream comes before a piece of work) tell whether two pieces of work are ordered at all.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "caching_allocator.h"

namespace pretend {

using Clock = std::map<int, int64_t>;  // stream -> work of it that is known to be done before

void fill_with_garbage(void* start, int64_t bytes);  // not a number in every float type, out of range as an index

struct Copy {
  enum class Kind { kUpload, kReadBack } kind;
  char* to;
  const char* from;
  int64_t bytes;
  std::shared_ptr<void> host_memory;  // pinned memory is not given away before the copy is done
  int64_t place = 0;                  // in its stream
  bool is_taken = false;              // the device's side is done
  std::vector<char> taken;            // of a read-back: what the device gave
};

struct Stream {
  int64_t place = 0;  // of the last work asked for
  Clock before;       // work of other streams that it waited for
  std::deque<Copy> copies;
};

struct Event {
  int stream = 0;
  Clock before;  // with its own stream's place
};

// Work of two streams on the same bytes that nothing puts in order.
struct MissingWait : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Streams {
 public:
  int make();  // number of a new stream; 0 is the default one
  bool has_several() const { return streams_.size() > 1; }

  void advance(int stream);            // before a kernel: the stream does what was asked of it
  void defer(int stream, Copy copy);   // asks for a copy
  void wait_for(int stream);           // the host waits
  void wait_for_all();
  void wait_for(const Event& event);
  Event record(int stream);
  void wait(int stream, const Event& event);  // a stream waits

  int64_t now(int stream) const { return streams_.at(stream).place; }
  bool has_passed(int stream, int64_t place) const;

  // Notes that a kernel of a stream reads or writes a block; throws where other work on it is neither before nor after.
  void read(int stream, Block& block, const std::string& who);
  void write(int stream, Block& block, const std::string& who);
  void forget(Block& block, const std::set<int>& lent);  // freed: its memory may serve the next tensor of its stream
  std::string take_complaint();  // what `forget`, which runs in destructors, found

 private:
  Stream& at(int stream) { return streams_.at(stream); }
  void take(int stream, Copy& copy);
  void take_until(int stream, int64_t place);
  void land_until(int stream, int64_t place);
  bool is_before(int writer, int64_t place, int reader);
  void require(bool ordered, int other, int stream, const std::string& who);

  std::map<int, Stream> streams_{{0, {}}};
  Clock host_;  // what the host has waited for; all work it asks for later comes after that
  std::string complaint_;
};

}  // namespace pretend
