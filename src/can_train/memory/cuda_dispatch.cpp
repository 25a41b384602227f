// Lets a PyTorch without a GPU dispatch operations on fake CUDA tensors as one with a GPU would.
//
// Two things are missing in a build without CUDA, and ask the driver in one with it: a device guard, which autograd asks
// for threads and streams, and CUDA's hooks, which operators ask what libraries there are, to choose cuDNN by the
// answer. Nothing here touches a device: fake tensors have shapes and no memory, and no kernel is run.
//
// Loading this changes a process for good, so only a child process of cuda_dispatch.py loads it.
// Source: DeviceGuardImplInterface.h of c10, CUDAHooksInterface.h of ATen, and autograd/engine.cpp.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>

#include <new>

namespace can_train {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// One device, one stream, and events that have always happened.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(DeviceType) {}
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  // Some of these are noexcept in older headers; a stricter override suits both.
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream before) const noexcept override { return before; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

 private:
  static Device only() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, only()); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// A device with cuDNN; convolutions, batch norms and LSTMs are chosen by what it says.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  // Older headers lack these.
  virtual bool supportsBFloat16RNNWithCuDNN() const { return true; }
  virtual bool isBuilt() const { return true; }
  virtual bool isAvailable() const { return true; }
  virtual long versionRuntimeCuDNN() const { return 91000; }
  virtual long versionCuDNNFrontend() const { return 11100; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};

// Replaces the hooks when the library is loaded. `import torch` has asked for them already, and PyTorch keeps the object
// that it got then: registering another class would come too late.
const bool installed = [] {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface), "both have no members but a table of functions");
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  return true;
}();

// Opens the protected parts of autograd's engine.
struct Engine : torch::autograd::Engine {
  static auto queues(torch::autograd::Engine& engine) { return (engine.*&Engine::device_ready_queues_).size(); }
  static void start(torch::autograd::Engine& engine) { (engine.*&Engine::start_device_threads)(); }
};

}  // namespace can_train

// Starts autograd's threads for devices. PyTorch starts them once in a process, before the first backward pass, and a
// child of a process that has run one on the CPU would have none.
extern "C" void can_train_start_autograd() {
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.initialize_device_threads_pool();
  if (can_train::Engine::queues(engine) == 0) {
    can_train::Engine::start(engine);
  }
}
