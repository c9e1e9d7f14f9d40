// Compares moving frames with one memcpy of as many bytes, in one thread: batches of 4
// environments, T steps, and frames of 4 x 84 x 84 uint8. The figure is bytes per second of CPU
// time.
#include <benchmark/benchmark.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pycollect/assemble.h"
#include "pycollect/multistep.h"
#include "pycollect/recorder.h"
#include "pycollect/slab_pool.h"
#include "pycollect/split.h"
#include "pycollect/thread_pool.h"

namespace pycollect::benchmarks {
namespace {

constexpr std::int64_t kEnvs = 4;
const Dims kFrame{4, 84, 84};
constexpr std::int64_t kFrameBytes = 4 * 84 * 84;

std::int64_t bytes_of(std::int64_t steps) { return kEnvs * steps * kFrameBytes; }

Dims with_frame(std::initializer_list<std::int64_t> lead) {
  Dims shape(lead);
  for (const std::int64_t extent : kFrame) {
    shape.push_back(extent);
  }
  return shape;
}

// Frames in the layout of a batch; their pages are already touched.
class Frames {
 public:
  explicit Frames(const Dims& shape) {
    const std::int64_t bytes = TensorView::contiguous(nullptr, DType::uint8, shape).bytes();
    memory_ = Memory::allocate(bytes);
    std::memset(memory_->data(), 1, static_cast<std::size_t>(bytes));
    view_ = TensorView::contiguous(memory_->data(), DType::uint8, shape);
  }
  const TensorView& view() const { return view_; }

 private:
  std::shared_ptr<Memory> memory_;
  TensorView view_;
};

void tell(benchmark::State& state, std::int64_t bytes) {
  state.SetBytesProcessed(state.iterations() * bytes);
}

void one_memcpy(benchmark::State& state) {
  const std::int64_t steps = state.range(0);
  const Frames source(with_frame({kEnvs, steps}));
  const Frames target(with_frame({kEnvs, steps}));
  for (auto _ : state) {
    std::memcpy(target.view().data, source.view().data, static_cast<std::size_t>(bytes_of(steps)));
    benchmark::ClobberMemory();
  }
  tell(state, bytes_of(steps));
}

Layout layout() {
  std::vector<Leaf> leaves{{{"pixels"}, DType::uint8, kFrame},
                           {{"next", "pixels"}, DType::uint8, kFrame},
                           {{"action"}, DType::int64, {}},
                           {{"next", "reward"}, DType::float32, {1}},
                           {{"collector", "traj_ids"}, DType::int64, {}}};
  for (const char* flag : {"done", "terminated", "truncated"}) {
    leaves.push_back({{flag}, DType::boolean, {1}});
    leaves.push_back({{"next", flag}, DType::boolean, {1}});
  }
  return Layout(leaves);
}

// A recorder of environments that always return the same frames, at no cost.
struct Recording {
  explicit Recording(std::int64_t steps)
      : pool(Placement(layout(), {1, kEnvs, steps}), 1, false),
        pixels(with_frame({kEnvs})),
        observation{pixels.view()},
        recorder(layout(), {{{"pixels"}, pixels.view()}}, {{"action"}}, {.envs = kEnvs}) {
    recorder.restart(observation);
  }

  std::shared_ptr<Slab> roll() {
    const Dims each{kEnvs};
    const std::array<ConstTensorView, 1> outputs{
        TensorView::contiguous(action.data(), DType::int64, each)};
    const TensorView flags = TensorView::contiguous(flag.data(), DType::boolean, each);
    const StepData data{observation, TensorView::contiguous(reward.data(), DType::float32, each),
                        flags, flags, outputs};
    std::shared_ptr<Slab> slab = pool.acquire();
    recorder.begin(slab, 0, 0);
    while (recorder.steps_left() > 0) {
      recorder.step(data);
    }
    recorder.finish();
    return slab;
  }

  SlabPool pool;
  Frames pixels;
  std::array<ConstTensorView, 1> observation;
  std::array<std::int64_t, kEnvs> action{};
  std::array<float, kEnvs> reward{};
  std::array<std::uint8_t, kEnvs> flag{};
  Recorder recorder;
};

// Writes each frame to two places, as many bytes as one memcpy of twice the steps.
void recorder(benchmark::State& state) {
  Recording recording(state.range(0));
  recording.roll();  // touches the pages of the slab
  for (auto _ : state) {
    benchmark::DoNotOptimize(recording.roll());
  }
  tell(state, 2 * bytes_of(state.range(0)));
}

// Copies a received rollout into row 1 of a batch of two.
void place(benchmark::State& state) {
  const std::int64_t steps = state.range(0);
  ThreadPool pool(1);
  Recording recording(steps);
  const std::shared_ptr<Slab> rollout = recording.roll();
  const Placement batch(layout(), {2, kEnvs, steps});
  const std::shared_ptr<Memory> memory = Memory::allocate(batch.bytes());
  std::memset(memory->data(), 1, static_cast<std::size_t>(batch.bytes()));
  const std::span<const std::byte> bytes(rollout->data(),
                                         static_cast<std::size_t>(rollout->bytes()));
  for (auto _ : state) {
    place_rollout(pool, memory->data(), batch, 1, bytes, rollout->placement());
    benchmark::ClobberMemory();
  }
  tell(state, 2 * bytes_of(steps));
}

// A batch of trajectories of `length` frames each.
class Trajectories {
 public:
  Trajectories(std::int64_t steps, std::int64_t length)
      : done_(static_cast<std::size_t>(kEnvs * steps)) {
    for (std::size_t i = 0; i < done_.size(); ++i) {
      done_[i] = static_cast<std::int64_t>(i + 1) % length == 0 ? 1 : 0;
    }
    plan_.emplace(TensorView::contiguous(done_.data(), DType::boolean, {kEnvs, steps}),
                  std::nullopt, std::nullopt, 2);
  }
  const SplitPlan& plan() const { return *plan_; }

 private:
  std::vector<std::uint8_t> done_;
  std::optional<SplitPlan> plan_;
};

// Times `move`, which moves one leaf from a batch to memory of this shape.
template <typename Move>
void moved(benchmark::State& state, const Dims& shape, const Move& move) {
  ThreadPool pool(1);
  const Frames source(with_frame({kEnvs, state.range(0)}));
  const Frames target(shape);
  const std::array<ConstTensorView, 1> sources{source.view()};
  const std::array targets{target.view()};
  for (auto _ : state) {
    move(pool, sources, targets);
    benchmark::ClobberMemory();
  }
  tell(state, bytes_of(state.range(0)));
}

void split_padded(benchmark::State& state) {
  const Trajectories trajectories(state.range(0), state.range(1));
  const SplitPlan& plan = trajectories.plan();
  moved(state, with_frame({plan.count(), plan.longest()}),
        [&](auto& pool, auto& from, auto& to) { plan.padded(pool, from, to); });
}

void split_flat(benchmark::State& state) {
  const Trajectories trajectories(state.range(0), state.range(1));
  const SplitPlan& plan = trajectories.plan();
  moved(state, with_frame({plan.frames()}),
        [&](auto& pool, auto& from, auto& to) { plan.flat(pool, from, to); });
}

void multistep_shift(benchmark::State& state) {
  const Trajectories trajectories(state.range(0), state.range(1));
  const MultiStepPlan plan(trajectories.plan(), 3);
  moved(state, with_frame({kEnvs, state.range(0)}),
        [&](auto& pool, auto& from, auto& to) { plan.shift(pool, from, to); });
}

// Targets of 14, 29 and 58 MB: within and beyond the size of the last-level cache.
void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("T")->Arg(128)->Arg(256)->Arg(512);
}

void lengths(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"T", "length"});
  for (const std::int64_t steps : {128, 512}) {
    benchmark->Args({steps, 64})->Args({steps, 8});
  }
}

BENCHMARK(one_memcpy)->Apply(sizes);
BENCHMARK(recorder)->Name("pixels_recorder")->Apply(sizes);
BENCHMARK(place)->Name("place_rollout")->Apply(sizes);
BENCHMARK(split_padded)->Apply(lengths);
BENCHMARK(split_flat)->Apply(lengths);
BENCHMARK(multistep_shift)->Apply(lengths);

}  // namespace
}  // namespace pycollect::benchmarks
