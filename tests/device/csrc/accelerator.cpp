// A CPU build of torch decides when it is compiled that it has no accelerator; this takes the place of its answer, since
// the library is loaded before libtorch.
#include <c10/core/DeviceType.h>

#include <optional>

namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
}  // namespace at::accelerator
