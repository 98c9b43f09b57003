// Two pretended devices: the host's memory and arithmetic behind the rules of accelerators.
//
// - Tensors of two devices do not mix, except zero-dimensional tensors, and indices as CUDA allows them.
// - There is no float64, as on Apple's GPUs.
// - Reads of a tensor's values by the host are counted, since the host would then wait for an accelerator; so are
//   copies from the host, and operations, each of which would launch at least one kernel.
//
// PyTorch's own CPU operations do the work, on the same memory; pretend_device.py registers the devices in Python.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <string>

namespace {

using at::Tensor;
using c10::SymIntArrayRef;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
constexpr c10::DeviceIndex kDevices = 2;
std::atomic<int64_t> waits{0}, uploads{0}, uploaded_bytes{0}, launches{0};
thread_local c10::DeviceIndex current = 0;

c10::Device device_at(c10::DeviceIndex index) { return c10::Device(kType, index < 0 ? current : index); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    return {data, data, raw_deleter(), device_at(-1)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) { c10::GetCPUAllocator()->raw_deallocate(data); };
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = device_at(-1);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(-1); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device_at(device.index()).index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
};

bool is_here(const Tensor& tensor) { return tensor.device().type() == kType; }

void check_dtype(at::ScalarType dtype) { TORCH_CHECK_TYPE(dtype != at::kDouble, "pretended devices have no float64"); }

// A CPU tensor on the memory of a tensor of the device.
Tensor on_host(const Tensor& tensor) {
  check_dtype(tensor.scalar_type());
  const auto storage = tensor.storage();
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  const int64_t size = storage.nbytes() / tensor.itemsize();
  const Tensor all = at::from_blob(storage.mutable_data(), {size}, [storage](void*) {}, options);
  return all.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// A new tensor of a device, which takes over the memory of the CPU tensor `made`.
Tensor taken(const Tensor& made, c10::Device device) {
  check_dtype(made.scalar_type());
  c10::DataPtr data(made.storage().mutable_data(), new Tensor(made),
                    [](void* owner) { delete static_cast<Tensor*>(owner); }, device);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), made.storage().nbytes(),
                                                       std::move(data), &allocator, true);
  Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), kKeys, made.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
  return tensor;
}

// A call of an operation, whose arguments must be on one device.
struct Call {
  const std::string& name;
  std::optional<c10::Device> device;

  // The CPU tensor for an argument. An `out` argument gets a new tensor, which is copied back after the call.
  Tensor given(const Tensor& tensor, bool out = false) {
    if (!tensor.defined()) return tensor;
    const bool indexes = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
    const bool fits = is_here(tensor) ? tensor.device() == device.value_or(tensor.device()) : tensor.dim() == 0 || indexes;
    TORCH_CHECK(fits, "Expected all tensors to be on the same device, but ", name, " got one on ", tensor.device(),
                ", of shape ", tensor.sizes());
    if (!is_here(tensor)) return tensor;
    device = tensor.device();
    return out ? at::empty({0}, tensor.options().device(at::kCPU)) : on_host(tensor);
  }
};

// Run an operation that has no implementation below on the CPU.
void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  std::vector<Tensor> originals(arguments.size()), hosts(arguments.size());
  Call call{op.operator_name().name};
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      originals[i] = value.toTensor();
      value = hosts[i] = call.given(originals[i], arguments[i].is_out());
    } else if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& tensor : value.toTensorVector()) all.push_back(call.given(tensor));
      value = all;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        all.push_back(tensor.has_value() ? std::optional<Tensor>(call.given(*tensor)) : std::nullopt);
      value = all;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      call.device = device_at(value.toDevice().index());
      value = c10::Device(at::kCPU);
    }
  }
  const c10::Device device = call.device.value_or(device_at(-1));
  ++launches;
  op.callBoxed(stack);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!originals[i].defined() || !is_here(originals[i])) continue;
    if (originals[i].sizes() != hosts[i].sizes()) originals[i].resize_(hosts[i].sizes());
    if (arguments[i].is_out()) on_host(originals[i]).copy_(hosts[i]);
  }
  const auto& returns = op.schema().returns();
  for (size_t r = 0; r < returns.size(); ++r) {
    auto& value = (*stack)[stack->size() - returns.size() + r];
    const auto* alias = returns[r].alias_info();
    TORCH_CHECK(alias == nullptr || alias->isWrite(), "pretended devices have no view for ", op.operator_name());
    if (alias != nullptr) {
      for (size_t i = 0; i < arguments.size(); ++i)
        if (arguments[i].alias_info() != nullptr && *arguments[i].alias_info() == *alias) value = originals[i];
    } else if (value.isTensor() && value.toTensor().defined()) {
      value = taken(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& tensor : value.toTensorVector()) all.push_back(taken(tensor, device));
      value = all;
    }
  }
}

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto kind = c10::dtype_or_default(dtype);
  check_dtype(kind);
  const c10::DeviceGuard guard(device_at(device.has_value() ? device->index() : -1));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, kKeys, kind, format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const auto kind = c10::dtype_or_default(dtype);
  check_dtype(kind);
  const c10::DeviceGuard guard(device_at(device.has_value() ? device->index() : -1));
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, kind);
}

const Tensor& resize(const Tensor& tensor, SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t bytes = (c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.itemsize();
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < bytes) {
    const c10::DeviceGuard guard(tensor.device());
    auto data = allocator.allocate(bytes);
    std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  ++(!is_here(to) ? waits : is_here(from) ? launches : uploads);
  if (!is_here(from)) uploaded_bytes += static_cast<int64_t>(from.nbytes());
  (is_here(to) ? on_host(to) : to).copy_(is_here(from) ? on_host(from) : from);
  return to;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) { return copy_from(from, to.resize_(from.sizes()), false); }

at::Scalar item(const Tensor& tensor) {
  ++waits;
  return at::_local_scalar_dense(on_host(tensor));
}

Tensor nonzero(const Tensor& tensor) {
  ++waits;
  return taken(at::nonzero(on_host(tensor)), tensor.device());
}

bool equal(const Tensor& one, const Tensor& other) {
  TORCH_CHECK(one.device() == other.device(), "Expected all tensors to be on the same device, but equal got two");
  ++waits;
  return at::equal(on_host(one), on_host(other));
}

// As on CUDA, where two checks of the probabilities are read by the host.
Tensor multinomial(const Tensor& tensor, int64_t num_samples, bool replacement, std::optional<at::Generator> generator) {
  waits += 2;
  launches += 9;
  return taken(at::multinomial(on_host(tensor), num_samples, replacement, generator), tensor.device());
}

Tensor histogram(const Tensor& tensor, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  return taken(at::histc(on_host(tensor).to(at::kFloat), bins, least, most).to(tensor.scalar_type()), tensor.device());
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   c10::SymInt groups) {
  std::optional<Tensor> own;
  if (bias.has_value() && bias->defined()) own = on_host(*bias);
  return taken(at::convolution_symint(on_host(input), on_host(weight), own, stride, padding, dilation, transposed,
                                      output_padding, groups),
               input.device());
}

Tensor& set_to(Tensor& tensor, at::Storage storage, c10::SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_to_all(Tensor& tensor, at::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {size}, {1});
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("nonzero", &nonzero);
  library.impl("equal", &equal);
  library.impl("multinomial", &multinomial);
  library.impl("histc", &histogram);
  library.impl("convolution_overrideable", &convolution);
  library.impl("set_.source_Storage_storage_offset", &set_to);
  library.impl("set_.source_Storage", &set_to_all);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
}

}  // namespace

extern "C" void start() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }

// How often the host has read values of a tensor, has copied to the device, and has launched an operation.
extern "C" int64_t times_waited() { return waits; }
extern "C" int64_t times_uploaded() { return uploads; }
extern "C" int64_t bytes_uploaded() { return uploaded_bytes; }
extern "C" int64_t times_launched() { return launches; }
