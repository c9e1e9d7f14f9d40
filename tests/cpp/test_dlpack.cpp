#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <stdexcept>

#include "pycollect/dlpack.h"

using namespace pycollect;

TEST_CASE("an exported tensor holds the lease until its deleter is called") {
  const auto lease = std::make_shared<std::array<float, 12>>();
  const TensorView whole = view(std::span(*lease), {3, 4});
  dlpack::Managed* old = to_dlpack(lease, whole);
  dlpack::ManagedVersioned* versioned = to_dlpack_versioned(lease, whole[1]);
  CHECK(lease.use_count() == 3);

  CHECK(old->tensor.data == lease->data());
  CHECK(old->tensor.ndim == 2);
  CHECK(old->tensor.shape[1] == 4);
  CHECK(old->tensor.strides[0] == 4);
  CHECK(old->tensor.strides[1] == 1);
  CHECK(old->tensor.device.type == dlpack::kCpu);
  CHECK(old->tensor.dtype.code == 2);
  CHECK(old->tensor.dtype.bits == 32);
  CHECK(versioned->version.major == 1);
  CHECK(versioned->tensor.data == lease->data() + 4);
  CHECK(versioned->tensor.ndim == 1);

  old->deleter(old);
  versioned->deleter(versioned);
  CHECK(lease.use_count() == 1);
}

TEST_CASE("device memory is exported with its device") {
  std::array<double, 2> numbers{};
  TensorView on_device = view(std::span(numbers), {2});
  on_device.device = {DeviceKind::cuda, 3};
  dlpack::Managed* managed = to_dlpack(nullptr, on_device);
  CHECK(managed->tensor.device.type == dlpack::kCuda);
  CHECK(managed->tensor.device.id == 3);
  managed->deleter(managed);
}

TEST_CASE("strides that are not multiples of the element size are refused") {
  std::array<float, 4> numbers{};
  TensorView packed = view(std::span(numbers), {4});
  packed.strides = Dims{5};
  CHECK_THROWS_AS(to_dlpack(nullptr, packed), std::invalid_argument);
}
