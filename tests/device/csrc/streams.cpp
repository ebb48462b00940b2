#include "streams.h"

#include <algorithm>
#include <cstring>

namespace pretend {
namespace {

void merge(Clock& into, const Clock& other) {
  for (auto [stream, place] : other) into[stream] = std::max(into[stream], place);
}

bool overlap(const char* a, int64_t a_bytes, const char* b, int64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

void fill_with_garbage(void* start, int64_t bytes) {
  const uint32_t word = 0x7fff7fff;  // NaN in float16, bfloat16, float32 and float64; over 2^62 in int64
  auto* at = static_cast<char*>(start);
  for (; bytes >= 4; bytes -= 4, at += 4) std::memcpy(at, &word, 4);
  std::memcpy(at, &word, bytes);
}

int Streams::make() {
  const int stream = static_cast<int>(streams_.size());
  streams_[stream];
  return stream;
}

// The device's side of a copy: an upload is complete with it, a read-back has left the device.
void Streams::take(int stream, Copy& copy) {
  if (copy.is_taken) return;
  copy.is_taken = true;
  if (copy.kind == Copy::Kind::kReadBack) {
    copy.taken.assign(copy.from, copy.from + copy.bytes);
    return;
  }
  // An upload of what the device has read back before, in the device's own order, needs no host in between.
  for (auto& [other, each] : streams_)
    for (Copy& earlier : each.copies)
      if (earlier.is_taken && earlier.kind == Copy::Kind::kReadBack && is_before(other, earlier.place, stream) &&
          overlap(earlier.to, earlier.bytes, copy.from, copy.bytes))
        std::memcpy(earlier.to, earlier.taken.data(), earlier.bytes);
  std::memcpy(copy.to, copy.from, copy.bytes);
}

void Streams::take_until(int stream, int64_t place) {
  for (Copy& copy : at(stream).copies)
    if (copy.place <= place) take(stream, copy);
}

void Streams::land_until(int stream, int64_t place) {
  auto& copies = at(stream).copies;
  take_until(stream, place);
  while (!copies.empty() && copies.front().place <= place) {
    Copy& copy = copies.front();
    if (copy.kind == Copy::Kind::kReadBack) std::memcpy(copy.to, copy.taken.data(), copy.bytes);
    copies.pop_front();
  }
}

void Streams::advance(int stream) {
  Stream& each = at(stream);
  ++each.place;
  if (each.copies.empty()) return;
  take_until(stream, each.place);
  // Uploads are complete; read-backs stay until the host waits.
  std::erase_if(each.copies, [](const Copy& copy) { return copy.kind == Copy::Kind::kUpload; });
}

void Streams::defer(int stream, Copy copy) {
  Stream& each = at(stream);
  copy.place = ++each.place;
  const bool is_read = std::any_of(each.copies.begin(), each.copies.end(), [&](const Copy& earlier) {
    return overlap(earlier.to, earlier.bytes, copy.to, copy.bytes) || overlap(earlier.from, earlier.bytes, copy.to, copy.bytes);
  });
  if (is_read) take_until(stream, copy.place);
  fill_with_garbage(copy.to, copy.bytes);
  each.copies.push_back(std::move(copy));
}

void Streams::wait_for(int stream) {
  land_until(stream, now(stream));
  merge(host_, at(stream).before);
  host_[stream] = now(stream);
}

void Streams::wait_for_all() {
  for (auto& [stream, each] : streams_) wait_for(stream);
}

void Streams::wait_for(const Event& event) {
  land_until(event.stream, event.before.at(event.stream));
  merge(host_, event.before);
}

Event Streams::record(int stream) {
  Event event{stream, at(stream).before};
  event.before[stream] = now(stream);
  return event;
}

void Streams::wait(int stream, const Event& event) {
  if (stream != event.stream) take_until(event.stream, event.before.at(event.stream));
  merge(at(stream).before, event.before);
}

bool Streams::has_passed(int stream, int64_t place) const {
  const auto& copies = streams_.at(stream).copies;
  return copies.empty() || copies.front().place > place;
}

bool Streams::is_before(int writer, int64_t place, int reader) {
  if (writer == reader) return true;
  return host_[writer] >= place || at(reader).before[writer] >= place;
}

void Streams::require(bool ordered, int other, int stream, const std::string& who) {
  if (ordered) return;
  throw MissingWait("missing wait: " + who + " on stream " + std::to_string(stream) + " uses memory that stream " +
                    std::to_string(other) + " may still be using; let it wait for an event of that stream first");
}

void Streams::read(int stream, Block& block, const std::string& who) {
  require(is_before(block.writer, block.written, stream), block.writer, stream, who);
  block.reads[stream] = now(stream);
}

void Streams::write(int stream, Block& block, const std::string& who) {
  require(is_before(block.writer, block.written, stream), block.writer, stream, who);
  for (auto [reader, place] : block.reads) require(is_before(reader, place, stream), reader, stream, who);
  block.writer = stream;
  block.written = now(stream);
  block.reads.clear();
}

void Streams::forget(Block& block, const std::set<int>& lent) {
  auto is_safe = [&](int stream, int64_t place) { return lent.count(stream) || is_before(stream, place, block.stream); };
  bool safe = is_safe(block.writer, block.written);
  for (auto [reader, place] : block.reads) safe = safe && is_safe(reader, place);
  if (!safe && complaint_.empty())
    complaint_ = "missing wait: memory of stream " + std::to_string(block.stream) +
                 " was freed while another stream may still be using it; call record_stream, or wait first";
  block.reads.clear();
}

std::string Streams::take_complaint() {
  std::string text;
  std::swap(text, complaint_);
  return text;
}

}  // namespace pretend
