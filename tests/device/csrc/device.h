// The pretend devices, and what torch's operators and Python need of them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "caching_allocator.h"
#include "streams.h"

namespace pretend {

struct Device {
  Device(int index, int64_t capacity_bytes);
  c10::Device torch_device() const { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }

  int index;
  Streams streams;
  CachingAllocator allocator;
  at::Generator generator;
};

// A block as a tensor's storage holds it.
struct Held {
  Device* device;
  Block* block;
};

std::recursive_mutex& lock();  // of everything here; held while a stream or an allocator is touched
using Locked = std::lock_guard<std::recursive_mutex>;

std::vector<std::unique_ptr<Device>>& devices();
Device& device(int index);  // -1 for the current one
int current_device();
void set_current_device(int index);
int current_stream(int device);

c10::Allocator* device_allocator();
bool is_pinned(const void* address);
Held* held(const at::Tensor& tensor);  // null without storage
at::Generator host_generator(const at::Generator& generator);  // whose numbers a device's generator draws
bool& draws_from_host();  // whether operators draw the host's numbers, to be compared with a run there
std::map<std::string, int64_t>& operators();  // how often each ran
std::map<std::string, int64_t>& transfers();  // uploads, read-backs and waits by kind
void count(std::map<std::string, int64_t>& counts, const std::string& what);

}  // namespace pretend
