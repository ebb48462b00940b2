// Operators of the pretend device: the CPU's kernels on aliases of the bytes, after the checks that CUDA's would make.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <tuple>
#include <unordered_set>

#include "device.h"

namespace pretend {
namespace {

using at::Tensor;
using Names = std::unordered_set<std::string>;
using OptionalType = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<at::Device>;

// CUDA's kernels take indices and target values from the host here, at the price of an upload.
const Names kTakesHostTensors = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_"};
// Scalars of the host are arguments of a kernel in pointwise operators, and in fused optimizers; not in these.
const Names kTakesNoHostScalar = {
    "aten::gather",   "aten::index_select", "aten::mm",   "aten::addmm",           "aten::bmm",     "aten::baddbmm",
    "aten::embedding", "aten::index_add_",  "aten::cat",  "aten::masked_scatter_", "aten::scatter.src"};
// The size of what they give depends on values, which the host has to wait for.
const Names kWaits = {
    "aten::nonzero",  "aten::masked_select",      "aten::unique_dim", "aten::_unique2",
    "aten::_unique",  "aten::unique_consecutive", "aten::equal",      "aten::repeat_interleave.Tensor",
    "aten::bincount", "aten::is_nonzero"};

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

Tensor host_alias(const Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
}

Tensor to_device(const Tensor& host) {
  Tensor made = empty_on_device(host.sizes(), host.strides(), host.scalar_type());
  if (host.numel() > 0) std::memcpy(made.data_ptr(), host.data_ptr(), at::detail::computeStorageNbytes(host.sizes(), host.strides(), host.itemsize()));
  return made;
}

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  else if (value.isOptionalTensorList()) for (const auto& tensor : value.toOptionalTensorVector()) if (tensor) visit(*tensor);
}

template <typename Function>
c10::IValue map_tensors(const c10::IValue& value, Function change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

void complain(const std::string& text) { TORCH_CHECK(text.empty(), text); }

// A kernel is launched: its stream goes on, and blocks that other streams use are checked for missing waits.
void launch(const std::string& name, const std::vector<Tensor>& read, const std::vector<Tensor>& written) {
  const Locked locked(lock());
  Device& on = device(-1);
  const int stream = current_stream(on.index);
  on.streams.advance(stream);
  if (!on.streams.has_several()) return;
  complain(on.streams.take_complaint());
  try {
    for (const Tensor& tensor : read) if (Held* h = held(tensor); h && h->device == &on) on.streams.read(stream, *h->block, name);
    for (const Tensor& tensor : written) if (Held* h = held(tensor); h && h->device == &on) on.streams.write(stream, *h->block, name);
  } catch (const MissingWait& error) {
    TORCH_CHECK(false, error.what());
  }
}

void wait_for_stream() {
  const Locked locked(lock());
  device(-1).streams.wait_for(current_stream(current_device()));
}

// A random operator draws from the device's generator: its state is put in the place of the CPU's for one call.
class DrawsFromDevice {
 public:
  explicit DrawsFromDevice(bool draws) : draws_(draws) {
    if (draws_) swap();
  }
  ~DrawsFromDevice() {
    if (draws_) swap();
  }
  DrawsFromDevice(const DrawsFromDevice&) = delete;
  DrawsFromDevice& operator=(const DrawsFromDevice&) = delete;

 private:
  static void swap() {
    at::Generator host = at::detail::getDefaultCPUGenerator(), numbers = host_generator(device(-1).generator);
    const Tensor kept = host.get_state();
    host.set_state(numbers.get_state());
    numbers.set_state(kept);
  }
  bool draws_;
};

// One call of an operator: its arguments as they came, and as the CPU's kernel gets them.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), name_(name_of(op)), stack_(stack), first_(stack->size() - op.schema().arguments().size()),
        given_(stack->begin() + static_cast<int64_t>(first_), stack->end()) {}

  void run() {
    find_device();
    const c10::OptionalDeviceGuard guard(device_);
    refuse_mixtures();
    count(operators(), name_);
    launch(name_, read_, written_);
    if (kWaits.count(name_)) {
      count(transfers(), "wait for a size: " + name_);
      wait_for_stream();
    }
    to_host();
    {
      const DrawsFromDevice draws(draws_from_default_);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    write_back();
    from_host();
  }

 private:
  void find_device() {
    for (size_t i = 0; i < given_.size(); ++i) {
      const auto* info = op_.schema().arguments()[i].alias_info();
      const bool is_written = info != nullptr && info->isWrite();
      for_each_tensor(given_[i], [&](const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cuda()) return;
        if (!device_) device_ = tensor.device();
        (is_written ? written_ : read_).push_back(tensor);
      });
      if (given_[i].isDevice() && given_[i].toDevice().is_cuda() && !device_) device_ = given_[i].toDevice();
    }
    if (device_ && !device_->has_index()) device_ = device(-1).torch_device();
  }

  void refuse_mixtures() {
    for (size_t i = 0; i < given_.size(); ++i) for_each_tensor(given_[i], [&](const Tensor& tensor) {
      if (!tensor.defined() || !device_ || tensor.device() == *device_ || !(read_.size() + written_.size())) return;
      if (tensor.is_cpu() && kTakesHostTensors.count(name_)) {
        if (name_ != "aten::index.Tensor_out") count(transfers(), "upload, pageable");  // there, a copy was counted
        return;
      }
      if (tensor.is_cpu() && tensor.dim() == 0 && !kTakesNoHostScalar.count(name_)) return;
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
                  tensor.device(), "! (when checking argument for argument ", op_.schema().arguments()[i].name(), " in method ", name_, ")");
    });
  }

  void to_host() {
    bool names_generator = false;
    for (size_t i = 0; i < given_.size(); ++i) {
      auto& value = (*stack_)[first_ + i];
      const auto* info = op_.schema().arguments()[i].alias_info();
      value = map_tensors(value, [&](const Tensor& tensor) -> Tensor {
        if (!tensor.defined() || !tensor.is_cuda()) return tensor;
        aliases_.push_back({tensor, host_alias(tensor), info != nullptr && info->isWrite()});
        return aliases_.back().host;
      });
      if (value.isDevice()) value = c10::Device(at::kCPU);
      if (value.isGenerator()) {
        value = host_generator(value.toGenerator());
        names_generator = true;
      }
    }
    draws_from_default_ = !draws_from_host() && !names_generator && op_.hasTag(at::Tag::nondeterministic_seeded);
  }

  // What the kernel put in place of an alias's bytes goes into the tensor.
  void write_back() {
    for (auto& alias : aliases_) {
      if (!alias.is_written) continue;
      if (!alias.device.sizes().equals(alias.host.sizes())) alias.device.resize_(alias.host.sizes());
      if (alias.device.numel() > 0 && alias.device.data_ptr() != alias.host.data_ptr()) host_alias(alias.device).copy_(alias.host);
    }
  }

  void from_host() {
    const size_t results = op_.schema().returns().size();
    for (size_t i = stack_->size() - results; i < stack_->size(); ++i)
      (*stack_)[i] = map_tensors((*stack_)[i], [&](const Tensor& tensor) -> Tensor {
        if (!tensor.defined() || !tensor.is_cpu() || !device_) return tensor;
        for (auto& alias : aliases_) if (alias.host.is_same(tensor)) return alias.device;
        return to_device(tensor);
      });
  }

  struct Alias {
    Tensor device, host;
    bool is_written;
  };
  const c10::OperatorHandle& op_;
  const std::string name_;
  torch::jit::Stack* stack_;
  size_t first_;
  std::vector<c10::IValue> given_;
  OptionalDevice device_;
  std::vector<Tensor> read_, written_;
  std::vector<Alias> aliases_;
  bool draws_from_default_ = false;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// ---------------------------------------------------------------- copies

bool lies_alike(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes().equals(b.sizes()) && a.strides().equals(b.strides()) &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

void copy_now(const Tensor& to, const Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor target = to.is_cuda() ? host_alias(to) : to;
  if (to.numel() > 0) target.copy_(from.is_cuda() ? host_alias(from) : from);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  const bool is_upload = from.is_cpu(), is_read_back = to.is_cpu();
  const c10::DeviceGuard guard(is_read_back ? from.device() : to.device());
  count(operators(), "aten::copy_");
  launch("aten::copy_", is_upload ? std::vector<Tensor>{} : std::vector<Tensor>{from}, is_read_back ? std::vector<Tensor>{} : std::vector<Tensor>{to});
  if (!is_upload && !is_read_back) {
    const Locked locked(lock());
    if (from.device() != to.device()) device(from.get_device()).streams.wait_for_all();
    copy_now(to, from);
    return to;
  }
  const Tensor& host = is_upload ? from : to;
  const bool pinned = is_pinned(host.const_data_ptr());
  count(transfers(), std::string(is_upload ? "upload, " : "read-back, ") + (pinned ? non_blocking ? "pinned, not blocking" : "pinned" : "pageable"));
  const Locked locked(lock());
  Device& on = device(-1);
  const int stream = current_stream(on.index);
  if (non_blocking && pinned && lies_alike(to, from) && to.numel() > 0) {
    auto kept = std::make_shared<at::Storage>(host.storage());
    on.streams.defer(stream, {is_upload ? Copy::Kind::kUpload : Copy::Kind::kReadBack, static_cast<char*>(to.data_ptr()),
                              static_cast<const char*>(from.const_data_ptr()), static_cast<int64_t>(to.nbytes()), kept});
    return to;
  }
  on.streams.wait_for(stream);
  copy_now(to, from);
  return to;
}

at::Scalar local_scalar(const Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  count(operators(), "aten::_local_scalar_dense");
  count(transfers(), "read-back, item");
  launch("aten::_local_scalar_dense", {self}, {});
  wait_for_stream();
  return host_alias(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  const Locked locked(lock());
  Held* h = held(self);
  if (h != nullptr && stream.id() != h->block->stream) h->block->other_streams.insert(static_cast<int>(stream.id()));
}

// ---------------------------------------------------------------- factories and views

c10::OptionalDeviceGuard on(const OptionalDevice& device) {
  return device && device->has_index() ? c10::OptionalDeviceGuard(*device) : c10::OptionalDeviceGuard();
}

Tensor empty_memory_format(c10::SymIntArrayRef sizes, OptionalType type, OptionalLayout, OptionalDevice device,
                           std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const auto guard = on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(type), format);
}

Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, OptionalType type, OptionalLayout,
                     OptionalDevice device, std::optional<bool>) {
  const auto guard = on(device);
  return empty_on_device(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::dtype_or_default(type));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef sizes) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes)); }

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const c10::DeviceGuard guard(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  const auto wanted = C10_AS_INTARRAYREF_SLOW(sizes);
  const size_t bytes = (c10::multiply_integers(wanted) + self.storage_offset()) * self.itemsize();
  const auto& storage = impl->unsafe_storage();
  if (storage.nbytes() < bytes) {
    auto data = device_allocator()->allocate(bytes);
    if (storage.nbytes() > 0) std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(wanted);
  return self;
}

Tensor& set_to(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  return self;
}

Tensor& set_storage_offset(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return set_to(self, std::move(storage), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  const int64_t elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_to(self, std::move(storage), 0, {elements}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_to(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  at::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_to(self, std::move(storage), 0, {0}, {});
}

// ---------------------------------------------------------------- what only CUDA has

// A product of half-precision matrices with a float32 result; CPU builds have no kernel for it.
Tensor& addmm_dtype_out(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType type, const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "expected mat1 and mat2 to have the same dtype");
  TORCH_CHECK(type == self.scalar_type(), "self dtype must match out_dtype");
  TORCH_CHECK(type == a.scalar_type() || (type == at::kFloat && (a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16)),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  const c10::DeviceGuard guard(a.device());
  count(operators(), "aten::addmm.dtype");
  launch("aten::addmm.dtype", {self, a, b}, {out});
  host_alias(out).copy_(at::addmm(host_alias(self), host_alias(a).to(type), host_alias(b).to(type), beta, alpha));
  return out;
}

Tensor addmm_dtype(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType type, const at::Scalar& beta, const at::Scalar& alpha) {
  Tensor out = empty_on_device({a.size(0), b.size(1)}, {b.size(1), 1}, type);
  return addmm_dtype_out(self, a, b, type, beta, alpha, out);
}

// CUDA counts whole numbers too.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  const c10::DeviceGuard guard(self.device());
  count(operators(), "aten::histc");
  launch("aten::histc", {self}, {});
  const Tensor numbers = host_alias(self);
  const bool is_whole = at::isIntegralType(self.scalar_type(), false);
  return to_device(at::histc(is_whole ? numbers.to(at::kDouble) : numbers, bins, least, most).to(self.scalar_type()));
}

// CUDA's sort of long rows holds places of the numbers, and CUB's buffers (`launch_stable_sort_kernel`).
std::tuple<Tensor, Tensor> sort_stable(const Tensor& self, std::optional<bool> stable, int64_t dim, bool descending) {
  constexpr int64_t kInPlace = 4096, kFewRows = 128, kAlone = 1000000, kPlace = 8;
  const c10::DeviceGuard guard(self.device());
  count(operators(), "aten::sort");
  launch("aten::sort", {self}, {});
  const auto [values, places] = at::sort(host_alias(self), stable, dim, descending);
  const std::tuple<Tensor, Tensor> sorted{to_device(values), to_device(places)};
  const int64_t length = self.dim() == 0 ? 1 : self.size(dim), number = self.numel(), pair = self.itemsize() + kPlace;
  if (length > kInPlace && number > 0) {
    const bool alone = number == length || length >= kAlone;
    const int64_t pairs = !alone && number / length < kFewRows ? 2 : 1;
    empty_on_device({(alone ? length : number) * (kPlace + pairs * pair)}, {1}, at::kByte);
  }
  return sorted;
}

// CUDA's softmax reads float16 and gives float32 at once; on a CPU that is a copy and another kernel.
constexpr char kSoftmax[] = "aten::_softmax", kSoftmaxBackward[] = "aten::_softmax_backward_data";
constexpr char kLogSoftmax[] = "aten::_log_softmax", kLogSoftmaxBackward[] = "aten::_log_softmax_backward_data";

template <const char* name, Tensor (*kernel)(const Tensor&, int64_t, bool)>
Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  const c10::DeviceGuard guard(self.device());
  count(operators(), name);
  launch(name, {self}, {});
  const Tensor numbers = host_alias(self);
  return to_device(kernel(half_to_float ? numbers.to(at::kFloat) : numbers, dim, false));
}

template <const char* name, Tensor (*kernel)(const Tensor&, const Tensor&, int64_t, at::ScalarType)>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType type) {
  const c10::DeviceGuard guard(grad.device());
  count(operators(), name);
  launch(name, {grad, output}, {});
  return to_device(kernel(host_alias(grad), host_alias(output), dim, grad.scalar_type()).to(type));
}

// The kernel that CUDA's `scaled_dot_product_attention` takes on an Ampere card without cuDNN (`sdp_utils.cpp`).
int64_t attention_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double, bool is_causal, std::optional<double>, bool enable_gqa) {
  constexpr int64_t kMath = 0, kFlash = 1, kEfficient = 2;
  const bool is_half = query.itemsize() == 2, is_rectangle = query.size(-2) != key.size(-2);
  const int64_t head = query.size(-1), value_head = value.size(-1), aligned = is_half ? 8 : 4;
  const bool equal_heads = query.size(1) == key.size(1);
  if (query.dim() != 4 || query.scalar_type() == at::kDouble || (is_causal && is_rectangle)) return kMath;
  if (is_half && !mask && head == value_head && head <= 256 && (equal_heads || enable_gqa)) return kFlash;
  return equal_heads && head % aligned == 0 && value_head % aligned == 0 ? kEfficient : kMath;
}

const bool attends = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel);
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  m.impl("addmm.dtype", &addmm_dtype);
  m.impl("histc", &histc);
  m.impl("sort.stable", &sort_stable);
  m.impl("addmm.dtype_out", &addmm_dtype_out);
  m.impl("_softmax", &softmax<kSoftmax, &at::_softmax>);
  m.impl("_log_softmax", &softmax<kLogSoftmax, &at::_log_softmax>);
  m.impl("_softmax_backward_data", &softmax_backward<kSoftmaxBackward, &at::_softmax_backward_data>);
  m.impl("_log_softmax_backward_data", &softmax_backward<kLogSoftmaxBackward, &at::_log_softmax_backward_data>);
  // CUDA's own kernels, where the dispatcher would take compositions, which hold more (or, of convolutions in three
  // dimensions, end at a kernel that is not there), before a fallback.
  for (const char* name : {"silu_backward", "mish_backward", "native_channel_shuffle", "native_layer_norm",
                           "native_group_norm", "addr", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace pretend
