#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda_support.h"
#include "fork.h"
#include "pycollect/cuda.h"
#include "pycollect/shared_memory.h"
#include "pycollect/slab_pool.h"
#include "pycollect/uploader.h"
#include "refused.h"

using namespace pycollect;

extern "C" int cuThreadExchangeStreamCaptureMode(int* mode);

TEST_CASE("the driver and its devices are found") {
  const FakeCuda fake;
  CHECK(cuda::available());
  CHECK(cuda::why_not() == "");
  CHECK(cuda::device_count() == 2);
  CHECK_REFUSED(cuda::Context::of(2), "device", std::invalid_argument);
  CHECK_THROWS_AS(cuda::Context::of(-1), std::invalid_argument);
}

TEST_CASE("a context is shared while it is in use") {
  const FakeCuda fake;
  auto first = cuda::Context::of(0);
  CHECK(first == cuda::Context::of(0));
  CHECK(fake.calls("cuDevicePrimaryCtxRetain") == 1);
  first.reset();
  CHECK(fake_cuda_live() == 0);
  first = cuda::Context::of(0);
  CHECK(fake_cuda_live() == 1);
}

TEST_CASE("an error has its call, name, number and text, and leaks nothing") {
  const FakeCuda fake;
  fake_cuda_fail("cuMemAlloc_v2", 0, 2);
  CHECK_THROWS_WITH_AS(cuda::DeviceMemory(0, 64),
                       doctest::Contains("cuMemAlloc of 64 bytes: CUDA_ERROR_OUT_OF_MEMORY (2)"),
                       cuda::Error);
  fake_cuda_fail("cuMemHostAlloc", 0, 2);
  CHECK_THROWS_AS(cuda::host_memory(0, 64), cuda::Error);
  fake_cuda_fail("cuDevicePrimaryCtxRetain", 0, 999);
  CHECK_THROWS_WITH_AS(cuda::Context::of(0), doctest::Contains("(999): injected by the test"),
                       cuda::Error);
  fake_cuda_fail("cuStreamCreate", 0, 2);
  CHECK_THROWS_AS(cuda::OwnStream(cuda::Context::of(0)), cuda::Error);
  CHECK_THROWS_AS(cuda::host_memory(0, 0), std::invalid_argument);
  CHECK_THROWS_AS(cuda::DeviceMemory(0, 0), std::invalid_argument);
}

TEST_CASE("an event is created when it is recorded, and done when its stream reaches it") {
  const FakeCuda fake;
  const auto context = cuda::Context::of(0);
  const cuda::OwnStream stream(context);
  static_assert(!std::is_copy_constructible_v<cuda::Event>);
  cuda::Event event(context);
  CHECK(event.done());
  event.wait();
  event.hold_back(stream.value());
  CHECK(fake.calls("cuEvent") == 0);

  fake_cuda_hold(1);
  event.record(stream.value());
  CHECK_FALSE(event.done());
  cuda::Event moved = std::move(event);
  CHECK_FALSE(moved.done());
  CHECK(event.done());  // NOLINT: a moved-from event marks no work
  fake_cuda_advance(stream.value(), 1);
  CHECK(moved.done());
  moved.record(stream.value());
  CHECK_FALSE(moved.done());
  moved.wait();
  CHECK(moved.done());
  CHECK(fake.calls("cuEventCreate") == 1);
  fake_cuda_fail("cuEventQuery", 0, 700);
  CHECK_THROWS_AS(moved.done(), cuda::Error);
}

TEST_CASE("a thread that waits for an event sleeps, and first polls if configured") {
  const FakeCuda fake;
  const auto context = cuda::Context::of(0);
  cuda::Event sleeps(context), polls(context, cuda::Event::Waiting::awake_first);
  for (cuda::Event* event : {&sleeps, &polls}) {
    event->record(0);
  }
  CHECK(fake.calls("cuEventCreate flags=3") == 2);  // blocking, without timing
  polls.wait();
  CHECK(fake.calls("cuEventSynchronize") == 0);  // done at the first query
  sleeps.wait();
  CHECK(fake.calls("cuEventSynchronize") == 1);

  fake_cuda_hold(1);
  polls.record(0);
  polls.wait();  // polls without success first
  CHECK(fake.calls("cuEventSynchronize") == 2);
  CHECK(polls.done());
}

TEST_CASE("pinned memory and a pool of pinned memory") {
  const FakeCuda fake;
  const auto memory = cuda::host_memory(0, 100);
  std::memset(memory->data(), 1, 100);
  CHECK(memory->bytes() == 100);

  const Placement placement(Layout({{{"a"}, DType::float32, {3}}}), {1, 2, 4, Order::stack});
  std::byte* first = nullptr;
  {
    SlabPool pool(placement, 2, false,
                  [](std::int64_t bytes) { return cuda::host_memory(0, bytes); });
    first = pool.acquire()->data();
    CHECK(pool.acquire()->data() == first);
    CHECK(fake.calls("cuMemHostAlloc") == 2);  // including the one above
  }
  CHECK(fake.calls("cuMemFreeHost") == 1);
}

TEST_CASE("shared memory is registered until the registration ends") {
  const FakeCuda fake;
  auto memory = share_memory(4096);
  {
    const cuda::Registration registration(memory, 0);
    CHECK(fake.calls("cuMemHostRegister_v2 bytes=4096 flags=1") == 1);  // portable, nothing else
    CHECK(&registration.memory() == memory.get());
    CHECK_THROWS_WITH_AS(cuda::Registration(memory, 0),
                         doctest::Contains("(712): injected by the test"), cuda::Error);
    memory.reset();  // the registration keeps the memory
    registration.memory().data()[0] = std::byte{1};
  }
  CHECK(fake.calls("cuMemHostUnregister") == 1);
}

TEST_CASE("the error of a refused kernel contains the driver's log") {
  const FakeCuda fake;
  const auto context = cuda::Context::of(0);
  CHECK_THROWS_WITH_AS(cuda::Kernel(context, "nothing", "pycollect_gather"),
                       doctest::Contains("pycollect_gather [line 1: no version]"), cuda::Error);
  CHECK_THROWS_AS(cuda::Kernel(context, ".version 7.0", "another"), cuda::Error);
}

TEST_CASE("destructors are silent after the context was lost") {
  const FakeCuda fake;
  auto memory = cuda::host_memory(0, 64);
  fake_cuda_fail("cuMemFreeHost", 0, 700);
  memory.reset();
  CHECK(fake.calls("cuMemFreeHost failed") == 1);
  fake_cuda_reset();  // the failed call left the object in the fake
}

TEST_CASE("a stream waits for another device's event, but a context refuses another's stream") {
  const FakeCuda fake;
  const cuda::OwnStream zeroth(cuda::Context::of(0));
  const cuda::OwnStream first(cuda::Context::of(1));
  cuda::Event event(cuda::Context::of(1));
  fake_cuda_hold(1);
  event.record(first.value());
  event.hold_back(zeroth.value());
  CHECK(fake_cuda_advance(zeroth.value(), 1) == 0);
  fake_cuda_advance(first.value(), 1);
  CHECK(fake_cuda_advance(zeroth.value(), 1) == 1);
  CHECK_THROWS_AS(event.record(zeroth.value()), cuda::Error);
  CHECK_THROWS_AS(cuda::Context::of(0)->wait(first.value()), cuda::Error);
}

TEST_CASE("a stream completes its queued work before it is destroyed") {
  const FakeCuda fake;
  const auto context = cuda::Context::of(0);
  const auto source = cuda::host_memory(0, 64);
  const cuda::DeviceMemory target(0, 64);
  std::memset(source->data(), 5, 64);
  fake_cuda_hold(1);
  {
    const cuda::OwnStream stream(context);
    context->copy_to_device(target.address(), source->data(), 64, stream.value());
  }
  CHECK(*reinterpret_cast<const char*>(target.address()) == 5);
}

TEST_CASE("the fake detects memory that is freed while a copy reads it") {
  const FakeCuda fake;
  {
    const auto context = cuda::Context::of(0);
    const cuda::OwnStream stream(context);
    const cuda::DeviceMemory target(0, 64);
    auto source = cuda::host_memory(0, 64);
    fake_cuda_hold(1);
    context->copy_to_device(target.address(), source->data(), 64, stream.value());
    source.reset();
  }
  CHECK(fake_cuda_freed_while_queued() == 1);
  fake_cuda_reset();  // otherwise the check at the end would fail this test, too
}

TEST_CASE(
    "a copy from pageable memory waits for earlier work of its stream, one from pinned memory does "
    "not") {
  const FakeCuda fake;
  const auto context = cuda::Context::of(0);
  const cuda::OwnStream stream(context);
  const cuda::DeviceMemory target(0, 64);
  const auto pinned = cuda::host_memory(0, 64);
  const std::vector<std::byte> ordinary(64);
  fake_cuda_hold(1);
  context->copy_to_device(target.address(), pinned->data(), 64, stream.value());
  context->copy_to_device(target.address(), pinned->data(), 64, stream.value());
  CHECK(fake_cuda_advance(stream.value(), 1) == 1);
  context->copy_to_device(target.address(), ordinary.data(), 64, stream.value());
  CHECK(fake_cuda_advance(stream.value(), 9) == 1);  // only the copy is left
}

TEST_CASE("a forked child frees nothing and reports why it has no CUDA") {
  if (!kMayFork) {
    return;
  }
  const FakeCuda fake;
  auto context = cuda::Context::of(0);
  auto memory = cuda::host_memory(0, 64);
  const cuda::DeviceMemory target(0, 64);
  auto event = std::make_unique<cuda::Event>(context);
  event->record(0);
  auto uploader = std::make_unique<cuda::Uploader>(0);
  uploader->upload(memory, {memory->data(), 64}, target.address(), 0);
  const std::string before = fake.log();
  CHECK(child_succeeds([&] {
    event.reset();
    uploader.reset();
    memory.reset();
    context.reset();
    return fake.log() == before && !cuda::available() && cuda::device_count() == 0 &&
           cuda::why_not().find("forked") != std::string::npos;
  }));
  CHECK(cuda::available());
}

TEST_CASE("another thread's capture of a graph is not disturbed") {
  const FakeCuda fake;
  const auto context = cuda::Context::of(0);
  const cuda::OwnStream stream(context);
  cuda::Event event(context);
  fake_cuda_capture(1);
  {
    const auto memory = cuda::host_memory(0, 64);
    const cuda::DeviceMemory on_device(0, 64);
    context->copy_to_device(on_device.address(), memory->data(), 64, stream.value());
    event.record(stream.value());
    CHECK(event.done());
    event.wait();
  }
  // Freed during the capture, too: only the context, the stream and the event remain.
  CHECK(fake_cuda_live() == 3);
  int mode = 1;  // the thread's own mode is restored
  cuThreadExchangeStreamCaptureMode(&mode);
  CHECK(event.done());
  cuThreadExchangeStreamCaptureMode(&mode);
  CHECK(mode == 1);
}
