// Tests that step() and reset() allocate nothing. A separate program, because it replaces the
// global operator new.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "recording.h"

namespace {

std::int64_t allocations = 0;  // the program has one thread

void* allocate(std::size_t size, std::size_t alignment) {
  ++allocations;
  const std::size_t whole = (size / alignment + 1) * alignment;
  if (void* memory = std::aligned_alloc(alignment, whole)) {
    return memory;
  }
  throw std::bad_alloc();
}

// Not inlined: otherwise gcc warns that free() releases memory from operator new.
[[gnu::noinline]] void release(void* memory) { std::free(memory); }

}  // namespace

// The array and nothrow forms call these.
void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

using namespace pycollect;
using namespace pycollect::tests;

namespace {

const Dims kPixels{2, 3, 4};

std::vector<Leaf> leaves_of(bool own_flags) {
  std::vector<Leaf> leaves = all_leaves();
  if (own_flags) {
    leaves = {{kObservation, DType::float32, {2}},
              {kNextObservation, DType::float32, {2}},
              {{"action"}, DType::int64, {}},
              {{"log_prob"}, DType::float32, {1}},
              {kReward, DType::float32, {1}},
              {kDone, DType::boolean, {1}},
              {kIds, DType::int64, {}},
              {kVersion, DType::int64, {}},
              {kMask, DType::boolean, {}}};
  }
  leaves.push_back({{"pixels"}, DType::uint8, kPixels});
  leaves.push_back({{"next", "pixels"}, DType::uint8, kPixels});
  leaves.push_back({{"state"}, DType::float32, {3}});
  leaves.push_back({{"next", "state"}, DType::float32, {3}});
  leaves.push_back({{"is_init"}, DType::boolean, {1}});
  return leaves;
}

// A recorder with all optional inputs. Their memory is allocated before it records.
class Loop {
 public:
  Loop(RecorderOptions options, bool own_flags)
      : P_(options.envs), pool_(Placement(Layout(leaves_of(own_flags)), {1, P_, kSteps}), 1, true) {
    std::vector<ObservationSpec> specs{{kObservation, array<float>(DType::float32, {2})},
                                       {{"pixels"}, array<std::uint8_t>(DType::uint8, kPixels)}};
    if (own_flags) {
      specs.push_back({{"reward"}, {}, false, false, Meaning::reward});
      specs.push_back({{"done"}, {}, false, false, Meaning::end});
    }
    const std::vector<StateSpec> states{
        {{"state"},
         array<float>(DType::float32, {3}),
         TensorView::contiguous(initial_.data(), DType::float32, {3})}};
    recorder_.emplace(Layout(leaves_of(own_flags)), specs,
                      std::vector<Key>{{"action"}, {"log_prob"}}, options, states,
                      array<std::uint8_t>(DType::boolean, {1}));
    observation_ = {array<float>(DType::float32, {2}), array<std::uint8_t>(DType::uint8, kPixels)};
    if (own_flags) {
      observation_.push_back(array<float>(DType::float32, {1}));
      ends_ = array<std::uint8_t>(DType::boolean, {1});
      observation_.push_back(ends_);
    } else {
      reward_ = array<float>(DType::float32, {});
      ends_ = array<std::uint8_t>(DType::boolean, {});
    }
    none_ = array<std::uint8_t>(DType::boolean, {});
    outputs_ = {array<std::int64_t>(DType::int64, {}), array<float>(DType::float32, {1})};
    states_ = {array<float>(DType::float32, {3})};
    recorder_->restart(observation_);
  }

  ConstTensorView& observation(std::size_t i) { return observation_[i]; }
  TensorView& reward() { return reward_; }

  // Records a rollout and returns the number of allocations of its steps and resets.
  std::int64_t roll() {
    recorder_->begin(pool_.acquire(), 0, 1);
    const std::int64_t before = allocations;
    for (std::int64_t t = 0; t < kSteps; ++t) {
      ends_.data[t % P_] ^= std::byte{1};  // episodes of one and of several steps
      if (recorder_->step({observation_, reward_, ends_, none_, outputs_, states_}) > 0) {
        recorder_->reset(observation_);
      }
    }
    const std::int64_t made = allocations - before;
    recorder_->finish();
    return made;
  }

  std::size_t take_episodes() { return recorder_->take_episodes().size(); }

  template <typename T>
  TensorView array(DType dtype, const Dims& frame) {
    const Dims shape = with_envs(P_, true, frame);
    TensorView view = TensorView::contiguous(nullptr, dtype, shape);
    memory_.emplace_back(static_cast<std::size_t>(view.bytes()));
    view.data = memory_.back().data();
    return view;
  }

 private:
  static constexpr std::int64_t kSteps = 40;

  std::int64_t P_;
  SlabPool pool_;
  std::vector<std::vector<std::byte>> memory_;
  std::array<float, 3> initial_{1, 2, 3};
  std::optional<Recorder> recorder_;
  std::vector<ConstTensorView> observation_, outputs_, states_;
  TensorView reward_, ends_, none_;
};

// The first rollout allocates the list of episodes.
void check_allocates_nothing(Loop& loop) {
  loop.roll();
  CHECK(loop.take_episodes() > 0);
  CHECK(loop.roll() == 0);
  CHECK(loop.take_episodes() > 0);
}

}  // namespace

TEST_CASE("the counter counts") {
  const std::int64_t before = allocations;
  const std::vector<int> one(1);
  CHECK(allocations == before + 1);
}

TEST_CASE("steps and resets allocate nothing for any kind of recorded data") {
  for (bool own_flags : {false, true}) {
    for (bool skips : {false, true}) {
      for (std::int64_t envs : {1, 3}) {
        Loop loop({.envs = envs,
                   .batched = true,
                   .max_frames_per_traj = skips ? 0 : 5,
                   .skips_after_done = skips,
                   .set_truncated = !own_flags},
                  own_flags);
        check_allocates_nothing(loop);
      }
    }
  }
}

TEST_CASE("steps and resets allocate nothing if numbers are cast or strided") {
  Loop loop({.envs = 3}, false);
  SUBCASE("wider numbers") {
    loop.observation(0) = loop.array<double>(DType::float64, {2});
    loop.reward() = loop.array<double>(DType::float64, {});
  }
  SUBCASE("whole numbers") {
    loop.observation(0) = loop.array<std::int32_t>(DType::int32, {2});
    loop.reward() = loop.array<std::int32_t>(DType::int32, {});
  }
  SUBCASE("permuted axes") {
    ConstTensorView& pixels = loop.observation(1);
    pixels.strides = {24, 1, 2, 6};
  }
  SUBCASE("gaps") {
    TensorView every_other = loop.array<float>(DType::float32, {4});
    every_other.shape = {3, 2};
    every_other.strides = {16, 8};
    loop.observation(0) = every_other;
    TensorView apart = loop.array<float>(DType::float32, {2});
    apart.shape = {3};
    apart.strides = {8};
    loop.reward() = apart;
  }
  check_allocates_nothing(loop);
}
