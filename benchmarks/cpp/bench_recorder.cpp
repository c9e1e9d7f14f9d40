// Measures the cost of recording in a C++ loop: CartPoles alone, with hand-written stores of a
// batch's leaves, and with a Recorder. P environments, T steps; the figure is CPU time per frame.
#include <benchmark/benchmark.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cartpole.h"
#include "pycollect/recorder.h"
#include "pycollect/slab_pool.h"

namespace pycollect::benchmarks {
namespace {

// 13 leaves, 66 bytes for each frame.
Layout layout() {
  std::vector<Leaf> leaves{{{"observation"}, DType::float32, {4}},
                           {{"action"}, DType::int64, {}},
                           {{"log_prob"}, DType::float32, {}},
                           {{"value"}, DType::float32, {}},
                           {{"next", "observation"}, DType::float32, {4}},
                           {{"next", "reward"}, DType::float32, {1}},
                           {{"collector", "traj_ids"}, DType::int64, {}}};
  for (const char* flag : {"done", "terminated", "truncated"}) {
    leaves.push_back({{flag}, DType::boolean, {1}});
    leaves.push_back({{"next", flag}, DType::boolean, {1}});
  }
  return Layout(leaves);
}

void tell(benchmark::State& state, std::int64_t envs, std::int64_t steps) {
  state.counters["frame"] =
      benchmark::Counter(static_cast<double>(state.iterations() * envs * steps),
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

// One rollout of the environments alone.
void bare_loop(benchmark::State& state) {
  const auto envs = static_cast<std::size_t>(state.range(0));
  const std::int64_t steps = state.range(1);
  CartPoles poles(envs);
  for (auto _ : state) {
    for (std::int64_t t = 0; t < steps; ++t) {
      for (std::size_t p = 0; p < envs; ++p) {
        poles.choose(p);
        if (poles.step(p)) {
          poles.reset(p);
        }
      }
      benchmark::ClobberMemory();
    }
  }
  tell(state, state.range(0), steps);
}

// The leaves of a batch as plain [P, T] arrays.
struct Plain {
  explicit Plain(std::size_t frames)
      : observation(4 * frames),
        next_observation(4 * frames),
        action(frames),
        ids(frames),
        log_prob(frames),
        value(frames),
        reward(frames) {
    for (auto* flags :
         {&root_done, &root_terminated, &root_truncated, &done, &terminated, &truncated}) {
      flags->resize(frames);
    }
  }
  std::vector<float> observation, next_observation;
  std::vector<std::int64_t> action, ids;
  std::vector<float> log_prob, value, reward;
  std::vector<std::uint8_t> root_done, root_terminated, root_truncated, done, terminated, truncated;
};

void by_hand(benchmark::State& state) {
  const auto envs = static_cast<std::size_t>(state.range(0));
  const auto steps = static_cast<std::size_t>(state.range(1));
  CartPoles poles(envs);
  Plain batch(envs * steps);
  std::vector<std::int64_t> ids(envs);
  for (auto _ : state) {
    for (std::size_t t = 0; t < steps; ++t) {
      for (std::size_t p = 0; p < envs; ++p) {
        const std::size_t i = p * steps + t;
        poles.choose(p);
        std::memcpy(&batch.observation[4 * i], &poles.observation[4 * p], 16);
        batch.action[i] = poles.action[p];
        batch.log_prob[i] = poles.log_prob[p];
        batch.value[i] = poles.value[p];
        batch.root_done[i] = batch.root_terminated[i] = batch.root_truncated[i] = 0;
        const bool done = poles.step(p);
        std::memcpy(&batch.next_observation[4 * i], &poles.observation[4 * p], 16);
        batch.reward[i] = poles.reward[p];
        batch.terminated[i] = poles.terminated[p];
        batch.truncated[i] = poles.truncated[p];
        batch.done[i] = static_cast<std::uint8_t>(done);
        batch.ids[i] = ids[p];
        if (done) {
          ++ids[p];
          poles.reset(p);
        }
      }
      benchmark::ClobberMemory();
    }
  }
  tell(state, state.range(0), state.range(1));
}

// The environments write into the memory that the policy reads, so the recorder reads each step
// from the current observation.
struct Recorded {
  Recorded(std::int64_t count, std::int64_t steps)
      : envs(count),
        poles(static_cast<std::size_t>(count)),
        pool(Placement(layout(), {1, envs, steps}), 1, false),
        observation{view(poles.observation.data(), DType::float32, {4})},
        outputs{view(poles.action.data(), DType::int64, {}),
                view(poles.log_prob.data(), DType::float32, {}),
                view(poles.value.data(), DType::float32, {})},
        reward(view(poles.reward.data(), DType::float32, {})),
        terminated(view(poles.terminated.data(), DType::boolean, {})),
        truncated(view(poles.truncated.data(), DType::boolean, {})),
        recorder(layout(), {{{"observation"}, view(poles.observation.data(), DType::float32, {4})}},
                 {{"action"}, {"log_prob"}, {"value"}}, {.envs = envs}) {
    recorder.restart(observation);
  }

  TensorView view(void* data, DType dtype, const Dims& frame) const {
    Dims shape;
    if (envs > 1) {
      shape.push_back(envs);
    }
    for (const std::int64_t extent : frame) {
      shape.push_back(extent);
    }
    return TensorView::contiguous(data, dtype, shape);
  }

  void reset() {
    const auto done = recorder.done();
    for (std::size_t p = 0; p < done.size(); ++p) {
      if (done[p] != 0) {
        poles.reset(p);
      }
    }
    recorder.reset(observation);
  }

  // Records one rollout with `record`, which returns how many environments must be reset.
  template <typename Record>
  void roll(const Record& record) {
    recorder.begin(pool.acquire(), 0, 0);
    while (recorder.steps_left() > 0) {
      for (std::size_t p = 0; p < poles.poles.size(); ++p) {
        poles.choose(p);
        poles.step(p);
      }
      if (record() != 0) {
        reset();
      }
    }
    benchmark::DoNotOptimize(recorder.finish());
    benchmark::DoNotOptimize(recorder.take_episodes());  // otherwise they accumulate
  }

  std::int64_t envs;
  CartPoles poles;
  SlabPool pool;
  std::array<ConstTensorView, 1> observation;
  std::array<ConstTensorView, 3> outputs;
  TensorView reward, terminated, truncated;
  Recorder recorder;
};

void recorder(benchmark::State& state) {
  Recorded run(state.range(0), state.range(1));
  const StepData data{run.observation, run.reward, run.terminated, run.truncated, run.outputs};
  for (auto _ : state) {
    run.roll([&] { return run.recorder.step(data); });
  }
  tell(state, state.range(0), state.range(1));
}

// One environment, whose reward and flags are passed as numbers.
void recorder_of_numbers(benchmark::State& state) {
  Recorded run(state.range(0), state.range(1));
  for (auto _ : state) {
    run.roll([&] {
      const CartPoles& poles = run.poles;
      return run.recorder.step(OneStep{run.observation, poles.reward[0], poles.terminated[0] != 0,
                                       poles.truncated[0] != 0, run.outputs});
    });
  }
  tell(state, state.range(0), state.range(1));
}

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"P", "T"});
  for (const auto& [envs, steps] : {std::array{1, 1024}, {16, 256}, {64, 128}, {256, 128}}) {
    benchmark->Args({envs, steps});
  }
}

BENCHMARK(bare_loop)->Apply(sizes);
BENCHMARK(by_hand)->Apply(sizes);
BENCHMARK(recorder)->Apply(sizes);
BENCHMARK(recorder_of_numbers)->ArgNames({"P", "T"})->Args({1, 1024});

}  // namespace
}  // namespace pycollect::benchmarks
