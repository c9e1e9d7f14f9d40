// Compares the device's gather with the host's. The fake driver runs the kernel's C++ source on the
// host.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_support.h"
#include "pycollect/device_gather.h"
#include "pycollect/thread_pool.h"
#include "refused.h"

using namespace pycollect;

namespace {

constexpr std::int64_t kRows = 6, kSteps = 50;

// An array in memory of the fake device, which is host memory as well.
struct Array {
  std::vector<std::byte> bytes;
  TensorView host;

  Array(DType dtype, const Dims& shape, int fill = 0)
      : host(TensorView::contiguous(nullptr, dtype, shape)) {
    bytes.resize(static_cast<std::size_t>(host.bytes()) + 64, static_cast<std::byte>(fill));
    // Aligned as torch's memory, so that large units occur.
    const auto address = (reinterpret_cast<std::uintptr_t>(bytes.data()) + 15) / 16 * 16;
    host.data = reinterpret_cast<std::byte*>(address);
  }
  Array(const Array&) = delete;
  Array(Array&&) = default;
  TensorView device() const {
    TensorView view = host;
    view.device = {DeviceKind::cuda, 0};
    return view;
  }
  bool equals(const Array& other) const {
    return std::memcmp(host.data, other.host.data, static_cast<std::size_t>(host.bytes())) == 0;
  }
};

std::vector<TensorView> hosts(const std::vector<Array>& arrays) {
  std::vector<TensorView> views;
  for (const Array& array : arrays) {
    views.push_back(array.host);
  }
  return views;
}

std::vector<TensorView> devices(const std::vector<Array>& arrays) {
  std::vector<TensorView> views;
  for (const Array& array : arrays) {
    views.push_back(array.device());
  }
  return views;
}

std::vector<ConstTensorView> read(const std::vector<TensorView>& views) {
  return {views.begin(), views.end()};
}

// Leaves of all unit sizes, an empty leaf, and a leaf with several tiles per frame.
const std::vector<std::pair<DType, Dims>> kFrames{
    {DType::boolean, {}},   {DType::int16, {3}},      {DType::float32, {5}},
    {DType::float64, {1}},  {DType::uint8, {32}},     {DType::float32, {0}},
    {DType::int64, {2, 3}}, {DType::complex128, {2}}, {DType::uint8, {40000}},
};

struct Batch {
  Batch() : done(DType::boolean, {kRows, kSteps}), ids(DType::int64, {kRows, kSteps}) {
    std::mt19937 random(3);
    for (std::int64_t cell = 0; cell < kRows * kSteps; ++cell) {
      done.host.data[cell] = std::byte{random() % 9 == 0};
      const std::int64_t id = random() % 8 == 0 ? -1 : 4;
      std::memcpy(ids.host.data + cell * 8, &id, 8);
    }
    for (const auto& [dtype, frame] : kFrames) {
      leaves.push_back(leaf(dtype, {kRows, kSteps}, frame));
      fill(leaves.back(), random);
    }
  }
  // Fills the array with repeated random bytes. Their number is prime, so that no two frames are
  // equal.
  static void fill(Array& leaf, std::mt19937& random) {
    std::array<std::byte, 10007> noise;
    std::generate(noise.begin(), noise.end(), [&] { return static_cast<std::byte>(random()); });
    const auto bytes = static_cast<std::size_t>(leaf.host.bytes());
    for (std::size_t at = 0; at < bytes; at += noise.size()) {
      std::memcpy(leaf.host.data + at, noise.data(), std::min(noise.size(), bytes - at));
    }
  }
  static Array leaf(DType dtype, Dims lead, const Dims& frame, int fill = 0) {
    for (std::int64_t extent : frame) {
      lead.push_back(extent);
    }
    return {dtype, lead, fill};
  }
  static std::vector<Array> targets(const Dims& lead, int fill) {
    std::vector<Array> made;
    for (const auto& [dtype, frame] : kFrames) {
      made.push_back(leaf(dtype, lead, frame, fill));
    }
    return made;
  }
  SplitPlan plan() const { return SplitPlan(done.host, ids.host, std::nullopt, 2); }

  Array done;
  Array ids;
  std::vector<Array> leaves;
};

struct Lent {
  explicit Lent(std::int64_t bytes) : memory(0, bytes) {}
  operator cuda::Workspace() const { return {memory.address(), memory.bytes()}; }
  cuda::DeviceMemory memory;
};

std::int64_t bytes_of(const std::vector<Array>& arrays) {
  std::int64_t bytes = 0;
  for (const Array& array : arrays) {
    bytes += array.host.bytes();
  }
  return bytes;
}

// Fills the array with numbers that have exact sums in any order.
void fill_rewards(const Array& reward, std::mt19937& random) {
  for (std::int64_t i = 0; i < reward.host.count(); ++i) {
    const auto value = static_cast<double>(random() % 64);
    if (reward.host.dtype == DType::float64) {
      std::memcpy(reward.host.data + i * 8, &value, 8);
    } else {
      const auto narrow = static_cast<float>(value);
      std::memcpy(reward.host.data + i * 4, &narrow, 4);
    }
  }
}

}  // namespace

TEST_CASE("padded and flat results equal the host's, with one launch") {
  const FakeCuda fake;
  const Batch batch;
  const SplitPlan plan = batch.plan();
  const cuda::DeviceGather gather(0);
  const Lent workspace(cuda::DeviceGather::workspace_bytes(
      plan, kFrames.size(), bytes_of(Batch::targets({plan.count(), plan.longest()}, 0))));
  ThreadPool pool(1);
  for (const bool padded : {true, false}) {
    const Dims lead = padded ? Dims{plan.count(), plan.longest()} : Dims{plan.frames()};
    const std::vector<Array> expected = Batch::targets(lead, 1);
    const std::vector<Array> targets = Batch::targets(lead, 2);
    const int launches = fake.calls("cuLaunchKernel");
    if (padded) {
      plan.padded(pool, read(hosts(batch.leaves)), hosts(expected));
      gather.padded(plan, read(devices(batch.leaves)), devices(targets), workspace, 0);
    } else {
      plan.flat(pool, read(hosts(batch.leaves)), hosts(expected));
      gather.flat(plan, read(devices(batch.leaves)), devices(targets), workspace, 0);
    }
    CHECK(fake.calls("cuLaunchKernel") == launches + 1);
    for (std::size_t i = 0; i < kFrames.size(); ++i) {
      CAPTURE(i);
      CHECK(targets[i].equals(expected[i]));
    }
  }
  CHECK(fake.calls("cuModuleLoadDataEx") == 1);
}

TEST_CASE("shifts and sums equal the host's, with one launch") {
  const FakeCuda fake;
  const Batch batch;
  std::mt19937 random(7);
  const cuda::DeviceGather gather(0);
  ThreadPool pool(1);
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{3}, std::int64_t{1} << 40}) {
    CAPTURE(n);
    const MultiStepPlan plan(batch.plan(), n);
    std::vector<Array> rewards;
    rewards.emplace_back(DType::float32, Dims{kRows, kSteps, 1});
    rewards.emplace_back(DType::float64, Dims{kRows, kSteps, 3});
    std::vector<Array> sums, expected_sums;
    for (const Array& reward : rewards) {
      fill_rewards(reward, random);
      sums.emplace_back(reward.host.dtype, reward.host.shape, 2);
      expected_sums.emplace_back(reward.host.dtype, reward.host.shape, 1);
    }
    const std::vector<Array> moved = Batch::targets({kRows, kSteps}, 2);
    const std::vector<Array> expected = Batch::targets({kRows, kSteps}, 1);
    plan.shift(pool, read(hosts(batch.leaves)), hosts(expected));
    plan.sum(pool, 0.5, read(hosts(rewards)), hosts(expected_sums));

    const Lent workspace(cuda::DeviceGather::workspace_bytes(plan, kFrames.size() + 2,
                                                             bytes_of(moved) + bytes_of(sums)));
    const auto from = read(devices(batch.leaves)), terms = read(devices(rewards));
    const auto to = devices(moved), summed_to = devices(sums);
    const int launches = fake.calls("cuLaunchKernel");
    gather.ahead(plan, {from, to, terms, summed_to, 0.5}, workspace, 0);
    CHECK(fake.calls("cuLaunchKernel") == launches + 1);
    for (std::size_t i = 0; i < kFrames.size(); ++i) {
      CAPTURE(i);
      CHECK(moved[i].equals(expected[i]));
    }
    CHECK(sums[0].equals(expected_sums[0]));
    CHECK(sums[1].equals(expected_sums[1]));
  }
}

TEST_CASE("rows and steps may be strided, and addresses odd") {
  const FakeCuda fake;
  std::vector<std::uint16_t> memory(2 * 3 * 8 + 1);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    memory[i] = static_cast<std::uint16_t>(i);
  }
  // [2, 3, 2] of int16, every other step of rows of 8, beginning behind the first number.
  TensorView source = TensorView::contiguous(memory.data() + 1, DType::int16, {2, 3, 2});
  source.strides[0] = 8 * 2 * 3;
  source.strides[1] = 8 * 2;
  Array done(DType::boolean, {2, 3});
  const SplitPlan plan(done.host, std::nullopt, std::nullopt, 2);
  const Array expected(DType::int16, {2, 3, 2}), target(DType::int16, {2, 3, 2});
  ThreadPool pool(1);
  plan.padded(pool, {{source}}, {{expected.host}});
  source.device = {DeviceKind::cuda, 0};
  const cuda::DeviceGather gather(0);
  const Lent workspace(cuda::DeviceGather::workspace_bytes(plan, 1, 1 << 20));
  gather.padded(plan, {{source}}, {{target.device()}}, workspace, 0);
  CHECK(target.equals(expected));
}

// Runs that begin at all remainders of sixteen, in batches with gaps between steps and rows.
TEST_CASE("frames of any size at any address are moved in units of sixteen bytes") {
  const FakeCuda fake;
  const Batch batch;
  const SplitPlan plan = batch.plan();
  const MultiStepPlan ahead(plan, 3);
  const cuda::DeviceGather gather(0);
  ThreadPool pool(1);
  std::mt19937 random(11);
  for (const std::int64_t frame : {1, 2, 3, 7, 12, 15, 16, 17, 24, 44, 68, 100, 4096}) {
    for (const std::int64_t gap : {std::int64_t{0}, std::int64_t{4}, std::int64_t{5}}) {
      CAPTURE(frame);
      CAPTURE(gap);
      std::vector<std::uint8_t> memory(
          static_cast<std::size_t>(kRows * (kSteps * (frame + gap) + gap) + 16));
      for (std::uint8_t& byte : memory) {
        byte = static_cast<std::uint8_t>(random());
      }
      TensorView source =
          TensorView::contiguous(memory.data() + gap % 2, DType::uint8, {kRows, kSteps, frame});
      source.strides[1] = frame + gap;
      source.strides[0] = kSteps * (frame + gap) + gap;
      TensorView there = source;
      there.device = {DeviceKind::cuda, 0};
      const Lent workspace(cuda::DeviceGather::workspace_bytes(plan, 1, 1 << 22));
      const Dims lead{plan.count(), plan.longest()};
      const Array expected = Batch::leaf(DType::uint8, lead, {frame}, 1);
      const Array target = Batch::leaf(DType::uint8, lead, {frame}, 2);
      plan.padded(pool, {{source}}, {{expected.host}});
      gather.padded(plan, {{there}}, {{target.device()}}, workspace, 0);
      CHECK(target.equals(expected));

      const Array moved = Batch::leaf(DType::uint8, {kRows, kSteps}, {frame}, 1);
      const Array moved_there = Batch::leaf(DType::uint8, {kRows, kSteps}, {frame}, 2);
      ahead.shift(pool, {{source}}, {{moved.host}});
      gather.ahead(ahead, {{{there}}, {{moved_there.device()}}, {}, {}, 1.0}, workspace, 0);
      CHECK(moved_there.equals(moved));
    }
  }
}

TEST_CASE("a target at an odd address is written without touching its neighbors") {
  const FakeCuda fake;
  const Batch batch;
  const SplitPlan plan = batch.plan();
  const cuda::DeviceGather gather(0);
  ThreadPool pool(1);
  const Array source = Batch::leaf(DType::uint8, {kRows, kSteps}, {20}, 3);
  for (std::int64_t i = 0; i < source.host.bytes(); ++i) {
    source.host.data[i] = static_cast<std::byte>(i);
  }
  const Array expected = Batch::leaf(DType::uint8, {plan.frames()}, {20});
  plan.flat(pool, {{source.host}}, {{expected.host}});
  const std::int64_t bytes = plan.frames() * 20;
  for (const std::int64_t skipped : {1, 4, 8}) {
    CAPTURE(skipped);
    Array room(DType::uint8, {bytes + 32}, 9);
    TensorView target = expected.device();
    target.data = room.host.data + skipped;
    const Lent workspace(cuda::DeviceGather::workspace_bytes(plan, 1, bytes));
    gather.flat(plan, {{source.device()}}, {{target}}, workspace, 0);
    CHECK(std::memcmp(target.data, expected.host.data, static_cast<std::size_t>(bytes)) == 0);
    CHECK(room.host.data[skipped - 1] == std::byte{9});
    CHECK(target.data[bytes] == std::byte{9});
  }
}

TEST_CASE("all rows may share the same memory") {
  const FakeCuda fake;
  std::vector<std::uint16_t> memory{1, 2, 3};
  TensorView source = TensorView::contiguous(memory.data(), DType::int16, {2, 3, 3});
  source.strides[0] = source.strides[1] = 0;
  const Array done(DType::boolean, {2, 3, 3});
  const SplitPlan plan(done.host, std::nullopt, std::nullopt, 3);
  const Array expected(DType::int16, {6, 3}), target(DType::int16, {6, 3});
  ThreadPool pool(1);
  plan.padded(pool, {{source}}, {{expected.host}});
  source.device = {DeviceKind::cuda, 0};
  const cuda::DeviceGather gather(0);
  const Lent workspace(cuda::DeviceGather::workspace_bytes(plan, 1, 1 << 20));
  gather.padded(plan, {{source}}, {{target.device()}}, workspace, 0);
  CHECK(target.equals(expected));
}

TEST_CASE("tables are copied on the stream of the launch, before it") {
  const FakeCuda fake;
  const Batch batch;
  const SplitPlan plan = batch.plan();
  const cuda::DeviceGather gather(0);
  const cuda::OwnStream stream(cuda::Context::of(0));
  const Lent workspace(cuda::DeviceGather::workspace_bytes(plan, 1, 1 << 20));
  const Array target(DType::boolean, {plan.frames()});
  fake_cuda_hold(1);
  gather.flat(plan, {{batch.leaves[0].device()}}, {{target.device()}}, workspace, stream.value());
  const std::string log = fake.log();
  const auto copied = log.find("cuMemcpyHtoDAsync_v2 ");
  const auto launched = log.find("cuLaunchKernel blocks=1 threads=256 stream=1");
  CHECK(log.find("pinned=1 stream=1", copied) < launched);
  CHECK(launched != std::string::npos);
  CHECK(fake_cuda_advance(stream.value(), 9) == 3);  // including the event after the table
}

TEST_CASE("a busy stream does not block the host, and its tables are not overwritten") {
  const FakeCuda fake;
  const Batch batch;
  const SplitPlan plan = batch.plan();
  const cuda::DeviceGather gather(0);
  const Lent workspace(cuda::DeviceGather::workspace_bytes(plan, 1, 1 << 20));
  const Array padded(DType::boolean, {plan.count(), plan.longest()});
  const Array flat(DType::boolean, {plan.frames()});
  fake_cuda_hold(1);
  gather.padded(plan, {{batch.leaves[0].device()}}, {{padded.device()}}, workspace, 0);
  gather.flat(plan, {{batch.leaves[0].device()}}, {{flat.device()}}, workspace, 0);
  CHECK(fake.calls("cuMemHostAlloc") == 2);
  CHECK(fake_cuda_advance(0, 99) == 6);
  const Array expected(DType::boolean, {plan.count(), plan.longest()}, 1);
  const Array expected_flat(DType::boolean, {plan.frames()}, 1);
  ThreadPool pool(1);
  plan.padded(pool, {{batch.leaves[0].host}}, {{expected.host}});
  plan.flat(pool, {{batch.leaves[0].host}}, {{expected_flat.host}});
  CHECK(padded.equals(expected));
  CHECK(flat.equals(expected_flat));

  gather.flat(plan, {{batch.leaves[0].device()}}, {{flat.device()}}, workspace, 0);
  CHECK(fake.calls("cuMemHostAlloc") == 2);  // blocks are reused
  for (int i = 0; i < 20; ++i) {
    gather.flat(plan, {{batch.leaves[0].device()}}, {{flat.device()}}, workspace, 0);
  }
  CHECK(fake.calls("cuMemHostAlloc") == 8);  // the maximum
  fake_cuda_hold(0);                         // queued work runs before its memory is freed
}

TEST_CASE(
    "if the event of a table cannot be recorded, the table has been read when the error is "
    "thrown") {
  const FakeCuda fake;
  const Batch batch;
  const SplitPlan plan = batch.plan();
  const cuda::DeviceGather gather(0);
  const Lent workspace(cuda::DeviceGather::workspace_bytes(plan, 1, 1 << 20));
  const Array flat(DType::boolean, {plan.frames()});
  fake_cuda_hold(1);
  fake_cuda_fail("cuEventRecord", 0, 700);
  CHECK_THROWS_AS(gather.flat(plan, {{batch.leaves[0].device()}}, {{flat.device()}}, workspace, 0),
                  cuda::Error);
  CHECK(fake.calls("cuStreamSynchronize") == 1);
}

TEST_CASE("an empty gather launches nothing") {
  const FakeCuda fake;
  Array done(DType::boolean, {3, 0});
  const SplitPlan plan(done.host, std::nullopt, std::nullopt, 2);
  const Array source(DType::float32, {3, 0, 2}), target(DType::float32, {0, 0, 2});
  const cuda::DeviceGather gather(0);
  gather.padded(plan, {{source.device()}}, {{target.device()}}, {}, 0);
  gather.padded(plan, {}, {}, {}, 0);
  CHECK(fake.calls("cuLaunchKernel") == 0);
}

TEST_CASE("invalid arguments are refused before anything is sent") {
  const FakeCuda fake;
  const Array done(DType::boolean, {2, 2, 3});
  const SplitPlan plan(done.host, std::nullopt, std::nullopt, 3);
  const cuda::DeviceGather gather(0);
  const Lent workspace(4096);
  const Array source(DType::float32, {2, 2, 3, 2}), target(DType::float32, {4, 3, 2});
  const auto check = [&](const TensorView& from, const TensorView& to, const char* name) {
    CHECK_REFUSED(gather.padded(plan, {{from}}, {{to}}, workspace, 0), name, std::invalid_argument);
  };
  check(source.host, target.device(), "source 0");
  check(source.device(), target.host, "target 0");
  check(source.device(), source.device(), "target 0");
  const Array wide(DType::float64, {4, 3, 2});
  check(source.device(), wide.device(), "source 0");
  TensorView strided = source.device();
  std::swap(strided.strides[0], strided.strides[1]);
  check(strided, target.device(), "source 0");
  strided = source.device();
  strided.strides[1] = 0;  // rows at two different distances
  check(strided, target.device(), "source 0");
  CHECK_REFUSED(gather.padded(plan, {{source.device()}}, {{target.device()}}, {64, 64}, 0),
                "workspace", std::invalid_argument);
  CHECK_THROWS_AS(gather.padded(plan, {{source.device()}}, {}, workspace, 0),
                  std::invalid_argument);
  const MultiStepPlan ahead(plan, 2);
  const Array whole(DType::int32, {2, 2, 3});
  CHECK_REFUSED(
      gather.ahead(ahead, {{}, {}, {{whole.device()}}, {{whole.device()}}, 1.0}, workspace, 0),
      "summed 0", std::invalid_argument);
  CHECK(fake.calls("cuMemcpy") == 0);
  fake_cuda_fail("cuModuleLoadDataEx", 0, 200);
  CHECK_THROWS_AS(cuda::DeviceGather(0), cuda::Error);
  fake_cuda_fail("cuLaunchKernel", 0, 700);
  CHECK_THROWS_WITH_AS(gather.padded(plan, {{source.device()}}, {{target.device()}}, workspace, 0),
                       doctest::Contains("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
                       cuda::Error);
}
