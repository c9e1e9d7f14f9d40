#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cuda_support.h"
#include "pycollect/shared_slab_pool.h"
#include "pycollect/slab_pool.h"
#include "pycollect/thread_pool.h"
#include "pycollect/uploader.h"

using namespace pycollect;

namespace {

constexpr std::int64_t kBytes = 4096;

// A consumer's stream, the device memory that it reads, and host memory.
struct Scene {
  std::shared_ptr<const cuda::Context> context = cuda::Context::of(0);
  cuda::OwnStream consumer{context};
  cuda::DeviceMemory target{0, kBytes};
  std::shared_ptr<Memory> host = cuda::host_memory(0, kBytes);

  Scene() {
    fill(1);
    std::memset(reinterpret_cast<void*>(target.address()), 0,
                kBytes);  // device memory of the fake is host memory
  }
  void fill(int value) { std::memset(host->data(), value, kBytes); }
  std::span<const std::byte> source() const { return {host->data(), kBytes}; }
  int seen(const cuda::DeviceMemory& memory) const {
    return *reinterpret_cast<const std::uint8_t*>(memory.address());
  }
  int seen() const { return seen(target); }
};

std::shared_ptr<const void> owner_that(const std::function<void()>& on_release) {
  return {new int(0), [on_release](int* value) {
            delete value;
            on_release();
          }};
}

}  // namespace

TEST_CASE("host memory is released when the host has seen its copy complete, not before") {
  const FakeCuda fake;
  Scene scene;
  cuda::Uploader uploader(0);
  int released = 0;
  const auto owner = [&] { return owner_that([&released] { ++released; }); };
  fake_cuda_hold(1);
  const auto first = uploader.upload(owner(), scene.source(), scene.target.address(), 0);
  const auto second = uploader.upload(owner(), scene.source(), scene.target.address(), 0);
  CHECK_FALSE(first->done());
  CHECK(uploader.release_finished() == 2);
  CHECK(released == 0);
  CHECK(fake_cuda_advance(uploader.stream(), 1) == 1);  // the copy itself
  CHECK_FALSE(first->done());
  fake_cuda_advance(uploader.stream(), 1);  // its event
  CHECK(released == 0);                     // not checked yet
  CHECK(first->done());
  CHECK(released == 1);
  CHECK(uploader.release_finished() == 1);
  fake_cuda_advance(uploader.stream(), 2);
  CHECK(uploader.release_finished() == 0);
  CHECK(released == 2);
  CHECK(second->done());
  CHECK(fake.log().find("pinned=0") == std::string::npos);
}

TEST_CASE("slabs circulate: a slab is not lent while it is read") {
  const FakeCuda fake;
  const Placement placement(Layout({{{"a"}, DType::uint8, {64}}}), {1, 1, 32, Order::stack});
  SlabPool pool(placement, 4, false,
                [](std::int64_t bytes) { return cuda::host_memory(0, bytes); });
  cuda::Uploader uploader(0);
  const cuda::DeviceMemory target(0, placement.bytes());
  fake_cuda_hold(1);
  const auto upload = [&] {
    uploader.release_finished();
    const std::shared_ptr<Slab> slab = pool.acquire();
    uploader.upload(slab, {slab->data(), static_cast<std::size_t>(slab->bytes())}, target.address(),
                    0);
    return slab->data();
  };
  const auto* first = upload();
  CHECK(upload() != first);
  CHECK(pool.stats().created == 2);
  fake_cuda_advance(uploader.stream(), 2);
  CHECK(upload() == first);
  CHECK(pool.stats().created == 2);
  uploader.wait();
  CHECK(pool.stats().lent == 0);
}

TEST_CASE("the consumer's stream waits for the copy, the host does not") {
  const FakeCuda fake;
  Scene scene;
  cuda::Uploader uploader(0);
  fake_cuda_hold(1);
  const cuda::DeviceMemory result(0, kBytes);
  const auto upload =
      uploader.upload(nullptr, scene.source(), scene.target.address(), scene.consumer.value());
  // The consumer's work: reads the target when its stream runs it.
  scene.context->copy_to_device(result.address(),
                                reinterpret_cast<const std::byte*>(scene.target.address()), kBytes,
                                scene.consumer.value());
  CHECK(fake_cuda_advance(scene.consumer.value(), 9) == 0);
  fake_cuda_advance(uploader.stream(), 1);
  CHECK(fake_cuda_advance(scene.consumer.value(), 9) == 0);
  fake_cuda_advance(uploader.stream(), 1);
  CHECK(fake_cuda_advance(scene.consumer.value(), 9) == 2);
  CHECK(scene.seen() == 1);

  // Another stream, afterwards.
  const cuda::OwnStream other(scene.context);
  const auto next =
      uploader.upload(nullptr, scene.source(), scene.target.address(), scene.consumer.value());
  next->hold_back(other.value());
  CHECK(fake_cuda_advance(other.value(), 9) == 0);
  next->wait();
  CHECK(next->done());
}

TEST_CASE("the copy waits for earlier readers of the target if `after` is passed") {
  const FakeCuda fake;
  Scene scene;
  cuda::Uploader uploader(0);
  fake_cuda_hold(1);
  const auto before = cuda::host_memory(0, kBytes);
  std::memset(before->data(), 9, kBytes);
  scene.context->copy_to_device(scene.target.address(), before->data(), kBytes,
                                scene.consumer.value());
  uploader.upload(nullptr, scene.source(), scene.target.address(), scene.consumer.value(),
                  scene.consumer.value());
  CHECK(fake_cuda_advance(uploader.stream(), 9) == 0);
  fake_cuda_advance(scene.consumer.value(), 9);
  CHECK(scene.seen() == 9);
  fake_cuda_advance(uploader.stream(), 9);
  CHECK(scene.seen() == 1);
}

TEST_CASE("batch k + 1 is copied while batch k is used") {
  const FakeCuda fake;
  Scene scene;
  cuda::Uploader uploader(0);
  fake_cuda_hold(1);
  const auto first =
      uploader.upload(nullptr, scene.source(), scene.target.address(), scene.consumer.value());
  scene.context->copy_to_device(scene.target.address(), scene.host->data(), 1,
                                scene.consumer.value());  // the learner's work on the batch
  const cuda::DeviceMemory other(0, kBytes);
  const auto second =
      uploader.upload(nullptr, scene.source(), other.address(), scene.consumer.value());
  fake_cuda_advance(uploader.stream(), 9);  // the learner's work has not begun
  CHECK(second->done());
  CHECK(scene.seen(other) == 1);
}

TEST_CASE("registered shared slabs are read without a copy on the host") {
  const FakeCuda fake;
  ThreadPool threads(1);
  SharedSlabPool pool(Placement(Layout({{{"a"}, DType::uint8, {4}}}), {1, 1, 8, Order::stack}), 1,
                      1, false);
  cuda::Uploader uploader(0);
  const std::shared_ptr<Slab> slab = pool.acquire();
  const cuda::Registration registration(slab->memory(), 0);
  const cuda::DeviceMemory target(0, slab->bytes());
  uploader.upload(slab, {slab->data(), static_cast<std::size_t>(slab->bytes())}, target.address(),
                  0);
  CHECK(fake.log().find("pinned=1") != std::string::npos);
}

TEST_CASE("a pool's shared slabs are registered together, until the last one is released") {
  const FakeCuda fake;
  ThreadPool threads(1);
  const Placement placement(Layout({{{"a"}, DType::uint8, {4}}}), {1, 1, 8, Order::stack});
  const cuda::DeviceMemory target(0, placement.bytes());
  cuda::Uploader uploader(0);
  auto pool = std::make_unique<SharedSlabPool>(placement, 2, 1, false);
  fake_cuda_fail("cuMemHostRegister_v2", 0, 2);
  CHECK_THROWS_AS(pool->pin(0), cuda::Error);
  CHECK_THROWS_AS(pool->pin(7), std::invalid_argument);
  pool->pin(0);
  fake_cuda_hold(1);
  for (int i = 0; i < 3; ++i) {
    const std::shared_ptr<Slab> slab = pool->acquire();
    uploader.upload(slab, {slab->data(), static_cast<std::size_t>(slab->bytes())}, target.address(),
                    0);
  }
  pool.reset();
  CHECK(fake.calls("cuMemHostUnregister") == 0);  // copies are pending
  uploader.wait();
  CHECK(fake.calls("cuMemHostRegister_v2") == 2);  // including the failed call
  CHECK(fake.calls("cuMemHostUnregister") == 1);
  CHECK(fake.log().find("pinned=0") == std::string::npos);
}

TEST_CASE("a slab that a pinned pool adds is registered as well") {
  const FakeCuda fake;
  const Placement placement(Layout({{{"a"}, DType::uint8, {4}}}), {1, 1, 8, Order::stack});
  SharedSlabPool pool(placement, 1, 0, false);
  pool.pin(0);
  {
    const std::shared_ptr<Slab> first = pool.acquire();
    fake_cuda_fail("cuMemHostRegister_v2", 0, 2);
    CHECK_THROWS_AS(pool.acquire(), cuda::Error);
    CHECK(pool.stats().created == 1);
    const cuda::DeviceMemory target(0, placement.bytes());
    cuda::Uploader uploader(0);
    const std::shared_ptr<Slab> added = pool.acquire();
    uploader.upload(added, {added->data(), static_cast<std::size_t>(added->bytes())},
                    target.address(), 0);
    uploader.wait();
  }
  CHECK(fake.log().find("pinned=0") == std::string::npos);
  CHECK(fake.calls("cuMemHostUnregister") == 0);
}

TEST_CASE("after any failure, owners are released and nothing reads their memory afterwards") {
  constexpr int kGone = 99;
  for (const char* symbol :
       {"cuMemcpyHtoDAsync_v2", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"}) {
    for (const int skip : {0, 1, 2}) {
      CAPTURE(symbol);
      CAPTURE(skip);
      const FakeCuda fake;
      Scene scene;
      int released = 0;
      int failed = 0;
      fake_cuda_hold(1);
      cuda::Uploader uploader(0);
      fake_cuda_fail(symbol, skip, 700);
      for (int i = 0; i < 3; ++i) {
        auto memory = cuda::host_memory(0, kBytes);
        std::memset(memory->data(), 1, kBytes);
        const std::span<const std::byte> source{memory->data(), kBytes};
        try {
          uploader.upload(owner_that([&released, memory] {
                            ++released;
                            std::memset(memory->data(), kGone, kBytes);
                          }),
                          source, scene.target.address(), 0, 0);
        } catch (const cuda::Error& error) {
          ++failed;
          CHECK(std::string(error.what()).find("CUDA_ERROR_ILLEGAL_ADDRESS (700)") !=
                std::string::npos);
        }
        CHECK(scene.seen() != kGone);
      }
      CHECK(failed == 1);
      uploader.wait();
      CHECK(scene.seen() == 1);
      CHECK(released == 3);
    }
  }
}

TEST_CASE("an event that could not be recorded is replaced by waiting for the stream") {
  const FakeCuda fake;
  Scene scene;
  cuda::Uploader uploader(0);
  fake_cuda_hold(1);
  fake_cuda_fail("cuEventRecord", 0, 700);
  int seen_at_the_end = 0;
  CHECK_THROWS_AS(uploader.upload(owner_that([&] { seen_at_the_end = scene.seen(); }),
                                  scene.source(), scene.target.address(), 0),
                  cuda::Error);
  CHECK(seen_at_the_end == 1);  // the copy was complete by then
  CHECK(fake.calls("cuStreamSynchronize") == 1);
}

TEST_CASE("an uploader's destructor waits for its copies; a failed constructor leaks nothing") {
  const FakeCuda fake;
  Scene scene;
  bool released = false;
  fake_cuda_hold(1);
  std::shared_ptr<cuda::Upload> upload;
  {
    cuda::Uploader uploader(0);
    upload = uploader.upload(owner_that([&] { released = true; }), scene.source(),
                             scene.target.address(), 0);
  }
  CHECK(released);
  CHECK(upload->done());
  CHECK(scene.seen() == 1);
  upload.reset();
  fake_cuda_fail("cuStreamCreate", 0, 2);
  CHECK_THROWS_AS(cuda::Uploader(0), cuda::Error);
  CHECK_THROWS_AS(cuda::Uploader(7), std::invalid_argument);
}

TEST_CASE("an empty copy is complete at once") {
  const FakeCuda fake;
  cuda::Uploader uploader(0);
  CHECK(uploader.upload(nullptr, {}, 0, 0)->done());
  CHECK(fake.calls("cuMemcpy") == 0);
}

TEST_CASE("several threads upload at once") {
  const FakeCuda fake;
  cuda::Uploader uploader(0);
  std::atomic<int> released = 0;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        Scene scene;
        for (int k = 0; k < 50; ++k) {
          const auto upload = uploader.upload(owner_that([&] { ++released; }), scene.source(),
                                              scene.target.address(), scene.consumer.value());
          if (k % 7 == 0) {
            upload->wait();
          }
        }
        uploader.wait();
      });
    }
  }
  CHECK(uploader.release_finished() == 0);
  CHECK(released == 200);
}
