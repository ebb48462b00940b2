// Storages of the device that change their size: `UntypedStorage.resize_`, which a CPU build has for the host's only.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "device.h"

namespace pretend {
namespace {

void resize_storage(const at::Tensor& self, int64_t bytes) {
  const c10::DeviceGuard guard(self.device());
  const auto& storage = self.storage();
  auto data = device_allocator()->allocate(static_cast<size_t>(bytes));
  const size_t kept = std::min(storage.nbytes(), static_cast<size_t>(bytes));
  if (kept > 0) std::memcpy(data.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(static_cast<size_t>(bytes));
}

}  // namespace
}  // namespace pretend

TORCH_LIBRARY_FRAGMENT(pretend, m) { m.def("resize_storage(Tensor self, int bytes) -> ()", pretend::resize_storage); }
