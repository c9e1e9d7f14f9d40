// Compares a Collector with a hand-written loop over a Recorder. The only worker runs in the
// caller's thread and steps P CartPoles for T steps, with random actions and 13 leaves. The figure
// is CPU time per frame.
#include <benchmark/benchmark.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "cartpole.h"
#include "pycollect/pycollect.h"

namespace pycollect::benchmarks {
namespace {

struct Pole {
  using Number = float;
  using Action = std::int64_t;
  static constexpr std::size_t kObservation = 4;

  void reset(std::span<float, 4> seen) {
    pole.reset(random);
    show(seen);
  }
  Outcome step(std::int64_t action, std::span<float, 4> seen) {
    pole.step(action);
    show(seen);
    return {.reward = 1, .terminated = pole.terminated(), .truncated = pole.truncated()};
  }
  void show(std::span<float, 4> seen) const {
    std::memcpy(seen.data(), pole.state, sizeof(pole.state));
  }

  CartPole pole{};
  Random random;
};

// Cheap random actions, and one more output.
struct Policy {
  void choose(std::span<std::int64_t> action, std::span<float> log_prob) {
    for (std::size_t p = 0; p < action.size(); ++p) {
      action[p] = static_cast<std::int64_t>(random.next() >> 63);
      log_prob[p] = -0.7F;
    }
  }

  std::vector<Leaf> outputs() const { return {{"log_prob", DType::float32, {}}}; }
  void operator()(std::span<const ConstTensorView> observations,
                  std::span<const TensorView> chosen) {
    const auto envs = static_cast<std::size_t>(observations[0].shape[0]);
    choose({chosen[0].as<std::int64_t>(), envs}, {chosen[1].as<float>(), envs});
  }

  Random random;
};

void tell(benchmark::State& state) {
  state.counters["frame"] =
      benchmark::Counter(static_cast<double>(state.iterations() * state.range(0) * state.range(1)),
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void collector(benchmark::State& state) {
  Collector<Pole> poles({.workers = 1, .envs = state.range(0), .steps = state.range(1)}, Policy{});
  for (auto _ : state) {
    benchmark::DoNotOptimize(poles.next());
  }
  tell(state);
}

// The code that a Collector replaces: environments, arrays of one step, and the loop.
class ByHand {
 public:
  ByHand(std::int64_t count, std::int64_t steps)
      : poles_(static_cast<std::size_t>(count)),
        observation_(4 * poles_.size()),
        action_(poles_.size()),
        log_prob_(poles_.size()),
        reward_(poles_.size()),
        terminated_(poles_.size()),
        truncated_(poles_.size()),
        seen_{TensorView::contiguous(observation_.data(), DType::float32, {count, 4})},
        chosen_{TensorView::contiguous(action_.data(), DType::int64, {count}),
                TensorView::contiguous(log_prob_.data(), DType::float32, {count})},
        step_{seen_, TensorView::contiguous(reward_.data(), DType::float64, {count}),
              TensorView::contiguous(terminated_.data(), DType::boolean, {count}),
              TensorView::contiguous(truncated_.data(), DType::boolean, {count}), chosen_},
        layout_(standard_layout({{"observation", DType::float32, {4}}},
                                {{"action", DType::int64, {}}, {"log_prob", DType::float32, {}}})),
        pool_(Placement(layout_, {1, count, steps}), 2, false),
        recorder_(layout_,
                  {{"observation",
                    TensorView::contiguous(observation_.data(), DType::float32, {count, 4})}},
                  {"action", "log_prob"}, {.envs = count, .batched = true}) {
    for (std::size_t p = 0; p < poles_.size(); ++p) {
      poles_[p].reset(seen_by(p));
    }
    recorder_.restart(seen_);
  }

  std::shared_ptr<Slab> roll() {
    std::shared_ptr<Slab> slab = pool_.acquire();
    recorder_.begin(slab, 0, 0);
    while (recorder_.steps_left() > 0) {
      policy_.choose(action_, log_prob_);
      for (std::size_t p = 0; p < poles_.size(); ++p) {
        const Outcome outcome = poles_[p].step(action_[p], seen_by(p));
        reward_[p] = outcome.reward;
        terminated_[p] = static_cast<std::uint8_t>(outcome.terminated);
        truncated_[p] = static_cast<std::uint8_t>(outcome.truncated);
      }
      if (recorder_.step(step_) > 0) {
        reset();
      }
    }
    recorder_.finish();
    benchmark::DoNotOptimize(recorder_.take_episodes());
    return slab;
  }

  std::size_t leaves() const { return layout_.size(); }

 private:
  std::span<float, 4> seen_by(std::size_t p) {
    return std::span<float, 4>(observation_.data() + 4 * p, 4);
  }

  void reset() {
    const std::span<const std::uint8_t> done = recorder_.done();
    for (std::size_t p = 0; p < done.size(); ++p) {
      if (done[p] != 0) {
        poles_[p].reset(seen_by(p));
      }
    }
    recorder_.reset(seen_);
  }

  std::vector<Pole> poles_;
  Policy policy_;
  std::vector<float> observation_;
  std::vector<std::int64_t> action_;
  std::vector<float> log_prob_;
  std::vector<double> reward_;
  std::vector<std::uint8_t> terminated_, truncated_;
  std::array<ConstTensorView, 1> seen_;
  std::array<ConstTensorView, 2> chosen_;
  StepData step_;
  Layout layout_;
  SlabPool pool_;
  Recorder recorder_;
};

void recorder_by_hand(benchmark::State& state) {
  ByHand loop(state.range(0), state.range(1));
  if (loop.leaves() != 13) {
    state.SkipWithError("expected 13 leaves");
    return;
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(loop.roll());
  }
  tell(state);
}

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"P", "T"});
  for (const auto& [envs, steps] : {std::array{1, 1024}, {16, 256}, {64, 128}, {256, 128}}) {
    benchmark->Args({envs, steps});
  }
}

BENCHMARK(recorder_by_hand)->Apply(sizes);
BENCHMARK(collector)->Apply(sizes);

}  // namespace
}  // namespace pycollect::benchmarks
