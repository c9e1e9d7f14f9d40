// PPO on CartPole without a framework: a hand-written network, trained on the batches of a
// Collector until the mean return of the last hundred episodes is 475. Takes a few seconds.
//
// J. Schulman et al., "Proximal policy optimization algorithms" (2017).
#include <pycollect/pycollect.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "cartpole.h"

namespace {

constexpr std::size_t kInputs = 4, kHidden = 32, kOutputs = 3;  // two logits and a value

// Two layers with tanh in between.
struct Network {
  static constexpr std::size_t kSecond = kHidden * (kInputs + 1);
  static constexpr std::size_t kCount = kSecond + kOutputs * (kHidden + 1);
  using Hidden = std::array<float, kHidden>;
  using Output = std::array<float, kOutputs>;

  explicit Network(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < kCount; ++i) {
      weights[i] = i < kSecond ? 0.5F * normal(random) : 0.05F * normal(random);
    }
  }

  Output forward(const float* input, Hidden& hidden) const {
    const float* w = weights.data();
    for (float& h : hidden) {
      h = std::tanh(std::inner_product(w, w + kInputs, input, w[kInputs]));
      w += kInputs + 1;
    }
    Output output;
    for (float& o : output) {
      o = std::inner_product(w, w + kHidden, hidden.begin(), w[kHidden]);
      w += kHidden + 1;
    }
    return output;
  }

  // Backpropagates the errors of the outputs, and adds the result to the gradient.
  void backward(const float* input, const Hidden& hidden, const Output& error,
                std::array<float, kCount>& gradient) const {
    Hidden back{};
    for (std::size_t o = 0; o < kOutputs; ++o) {
      const std::size_t row = kSecond + o * (kHidden + 1);
      for (std::size_t h = 0; h < kHidden; ++h) {
        gradient[row + h] += error[o] * hidden[h];
        back[h] += error[o] * weights[row + h];
      }
      gradient[row + kHidden] += error[o];
    }
    for (std::size_t h = 0; h < kHidden; ++h) {
      const std::size_t row = h * (kInputs + 1);
      const float slope = back[h] * (1 - hidden[h] * hidden[h]);
      for (std::size_t i = 0; i < kInputs; ++i) {
        gradient[row + i] += slope * input[i];
      }
      gradient[row + kInputs] += slope;
    }
  }

  std::array<float, kCount> weights;
};

// D. P. Kingma and J. Ba, "Adam" (2015).
struct Adam {
  void step(Network& network, const std::array<float, Network::kCount>& gradient, float rate) {
    first *= 0.9F;
    second *= 0.999F;
    for (std::size_t i = 0; i < Network::kCount; ++i) {
      mean[i] = 0.9F * mean[i] + 0.1F * gradient[i];
      square[i] = 0.999F * square[i] + 0.001F * gradient[i] * gradient[i];
      network.weights[i] -=
          rate * mean[i] / (1 - first) / (std::sqrt(square[i] / (1 - second)) + 1e-5F);
    }
  }

  std::array<float, Network::kCount> mean{}, square{};
  float first = 1, second = 1;
};

// The probability of pushing to the right.
float right(const Network::Output& output) { return 1 / (1 + std::exp(output[0] - output[1])); }

// Every worker has a copy with its own random generator. All use the learner's network, which
// changes only between batches.
struct Policy {
  std::vector<pycollect::Leaf> outputs() const {
    return {{"log_prob", pycollect::DType::float32, {}}};
  }
  void seed(std::uint64_t given) { random.seed(given); }

  void operator()(std::span<const pycollect::ConstTensorView> observations,
                  std::span<const pycollect::TensorView> outputs) {
    const float* observation = observations[0].as<float>();
    auto* action = outputs[0].as<std::int64_t>();
    auto* log_prob = outputs[1].as<float>();
    Network::Hidden hidden;
    const auto envs = static_cast<std::size_t>(outputs[0].shape[0]);
    for (std::size_t p = 0; p < envs; ++p) {
      const float probability = right(network->forward(observation + kInputs * p, hidden));
      action[p] = std::uniform_real_distribution<float>()(random) < probability;
      log_prob[p] = std::log(action[p] == 1 ? probability : 1 - probability);
    }
  }

  const Network* network;
  std::mt19937_64 random;
};

struct Learner {
  static constexpr float kGamma = 0.98F, kLambda = 0.95F, kClip = 0.2F, kRate = 2.5e-3F;
  static constexpr int kEpochs = 6;
  static constexpr std::size_t kMinibatch = 256;

  // Generalized advantage estimation, backwards through each trajectory. A trajectory that was
  // truncated or continues in the next batch is bootstrapped from the value of its last successor.
  void estimate(const pycollect::Batch& batch) {
    const auto observation = batch.get<float>("observation");
    const auto next = batch.get<float>("next.observation");
    const auto reward = batch.get<float>("next.reward");
    const auto terminated = batch.get<bool>("next.terminated");
    advantage.resize(reward.size());
    target.resize(reward.size());
    Network::Hidden hidden;
    for (const pycollect::Segment& segment : batch.trajectories().segments()) {
      const auto first =
          static_cast<std::size_t>(segment.row * batch.geometry().steps + segment.start);
      std::size_t cell = first + static_cast<std::size_t>(segment.length) - 1;
      float following = network.forward(&next[kInputs * cell], hidden)[2];
      float sum = 0;
      for (;; --cell) {
        const float value = network.forward(&observation[kInputs * cell], hidden)[2];
        const float alive = terminated[cell] ? 0.0F : 1.0F;
        sum = reward[cell] + kGamma * alive * following - value + kGamma * kLambda * alive * sum;
        advantage[cell] = sum;
        target[cell] = sum + value;
        following = value;
        if (cell == first) {
          break;
        }
      }
    }
  }

  void learn(const pycollect::Batch& batch, float rate) {
    estimate(batch);
    std::vector<std::size_t> order(advantage.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      std::shuffle(order.begin(), order.end(), random);
      for (std::size_t i = 0; i < order.size(); i += kMinibatch) {
        const std::size_t count = std::min(kMinibatch, order.size() - i);
        improve(batch, std::span(order).subspan(i, count), rate);
      }
    }
  }

  // Makes one Adam step on some cells of the batch.
  void improve(const pycollect::Batch& batch, std::span<const std::size_t> cells, float rate) {
    const auto observation = batch.get<float>("observation");
    const auto action = batch.get<std::int64_t>("action");
    const auto log_prob = batch.get<float>("log_prob");
    float mean = 0, square = 0;
    for (const std::size_t cell : cells) {
      mean += advantage[cell];
      square += advantage[cell] * advantage[cell];
    }
    const auto count = static_cast<float>(cells.size());
    mean /= count;
    const float deviation = std::sqrt(std::max(square / count - mean * mean, 0.0F)) + 1e-8F;

    std::array<float, Network::kCount> gradient{};
    Network::Hidden hidden;
    for (const std::size_t cell : cells) {
      const float* input = &observation[kInputs * cell];
      const Network::Output output = network.forward(input, hidden);
      const float probability = right(output);
      const float taken = action[cell] == 1 ? probability : 1 - probability;
      const float ratio = taken / std::exp(log_prob[cell]);
      const float worth = (advantage[cell] - mean) / deviation;
      const bool clipped = worth > 0 ? ratio > 1 + kClip : ratio < 1 - kClip;
      // d log(taken) / d logit of "right"; the derivative for "left" is the opposite.
      const float direction = static_cast<float>(action[cell]) - probability;
      float slope = clipped ? 0 : -worth * ratio * direction;
      // Entropy bonus: its derivative in that logit is -p (1 - p) log(p / (1 - p)).
      slope += 0.005F * probability * (1 - probability) * (output[1] - output[0]);
      const float error = 0.5F * (output[2] - target[cell]);
      network.backward(input, hidden, {-slope / count, slope / count, error / count}, gradient);
    }
    const float length =
        std::sqrt(std::inner_product(gradient.begin(), gradient.end(), gradient.begin(), 0.0F));
    for (float& g : gradient) {
      g *= std::min(1.0F, 0.5F / length);
    }
    adam.step(network, gradient, rate);
  }

  Network network{1};
  Adam adam;
  std::mt19937_64 random{2};
  std::vector<float> advantage, target;
};

}  // namespace

int main() {
  constexpr long long kBudget = 2'000'000;
  Learner learner;
  pycollect::Collector<CartPole> collector({.workers = 2, .envs = 8, .steps = 128, .seed = 3},
                                           Policy{&learner.network, {}});
  std::deque<double> returns;
  double mean = 0;
  while (collector.ledger().delivered < kBudget) {
    const pycollect::Batch batch = collector.next();
    for (const pycollect::Batch::Episode& episode : batch.episodes()) {
      returns.push_back(episode.total_reward);
      if (returns.size() > 100) {
        returns.pop_front();
      }
    }
    mean = std::accumulate(returns.begin(), returns.end(), 0.0) /
           static_cast<double>(std::max<std::size_t>(returns.size(), 1));
    const pycollect::Ledger ledger = collector.ledger();
    if (batch.header(0).sequence % 20 == 0) {
      std::printf("%8lld frames, mean return %.1f\n", ledger.delivered, mean);
    }
    if (returns.size() == 100 && mean >= 475) {
      std::printf("%8lld frames, mean return %.1f: solved\n", ledger.delivered, mean);
      return 0;
    }
    const float left = 1 - static_cast<float>(ledger.delivered) / static_cast<float>(kBudget);
    learner.learn(batch, Learner::kRate * left);
  }
  std::printf("not solved within %lld frames, mean return %.1f\n", kBudget, mean);
  return 1;
}
