// PPO on CartPole with libtorch. Tensors are views of the batch's slab, without a copy; the slab
// returns to its pool when the last view is gone.
//
// J. Schulman et al., "Proximal policy optimization algorithms" (2017).
#include <ATen/DLConvertor.h>
#include <pycollect/pycollect.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <numeric>
#include <span>
#include <vector>

#include "cartpole.h"

namespace {

// An entry of the batch, [W, P, T, *frame], as a view of its memory.
torch::Tensor tensor_of(const pycollect::Batch& batch, const pycollect::Key& key) {
  return at::fromDLPack(
      reinterpret_cast<DLManagedTensor*>(pycollect::to_dlpack(batch.lease(), batch.view(key))));
}

struct NetworkImpl : torch::nn::Module {
  NetworkImpl() {
    hidden = register_module("hidden", torch::nn::Linear(4, 64));
    logits = register_module("logits", torch::nn::Linear(64, 2));
    value = register_module("value", torch::nn::Linear(64, 1));
  }
  torch::Tensor features(const torch::Tensor& observation) {
    return torch::tanh(hidden(observation));
  }
  torch::nn::Linear hidden{nullptr}, logits{nullptr}, value{nullptr};
};
TORCH_MODULE(Network);

// Writes sampled actions and their log-probabilities into the memory that the recorder reads.
struct Policy {
  std::vector<pycollect::Leaf> outputs() const {
    return {{"log_prob", pycollect::DType::float32, {1}}};
  }
  void seed(std::uint64_t given) { random = at::make_generator<at::CPUGeneratorImpl>(given); }

  void operator()(std::span<const pycollect::ConstTensorView> observations,
                  std::span<const pycollect::TensorView> outputs) {
    const torch::NoGradGuard no_grad;
    const std::int64_t envs = observations[0].shape[0];
    auto* observation = const_cast<float*>(observations[0].as<float>());
    const torch::Tensor seen = torch::from_blob(observation, {envs, 4}, torch::kFloat32);
    torch::Tensor action =
        torch::from_blob(outputs[0].as<std::int64_t>(), {envs, 1}, torch::kInt64);
    torch::Tensor log_prob = torch::from_blob(outputs[1].as<float>(), {envs, 1}, torch::kFloat32);
    const torch::Tensor all = torch::log_softmax(network->logits(network->features(seen)), -1);
    action.copy_(torch::multinomial(all.exp(), 1, true, random));
    log_prob.copy_(all.gather(-1, action));
  }

  Network network;
  at::Generator random;
};

// Returns, backwards in time, [W, P, T]; unfinished trajectories end in the critic's value.
torch::Tensor returns_of(const torch::Tensor& reward, const torch::Tensor& terminated,
                         const torch::Tensor& done, const torch::Tensor& value_of_next) {
  constexpr double kGamma = 0.98, kLambda = 0.95;
  torch::Tensor result = torch::empty_like(reward);
  torch::Tensor following = value_of_next.select(-1, -1);
  for (std::int64_t t = reward.size(-1) - 1; t >= 0; --t) {
    const torch::Tensor value = value_of_next.select(-1, t);
    const torch::Tensor mixed =
        torch::where(done.select(-1, t), value, (1 - kLambda) * value + kLambda * following);
    following = reward.select(-1, t) + kGamma * torch::where(terminated.select(-1, t), 0.0, mixed);
    result.select(-1, t).copy_(following);
  }
  return result;
}

// Training data of one batch, [W * P * T, ...].
struct Frames {
  Frames(Network& network, const pycollect::Batch& batch)
      : observation(tensor_of(batch, "observation")),
        action(tensor_of(batch, "action").reshape({-1, 1})),
        log_prob(tensor_of(batch, "log_prob").reshape({-1, 1})) {
    const torch::NoGradGuard no_grad;
    const auto value_of = [&](const torch::Tensor& seen) {
      return network->value(network->features(seen)).squeeze(-1);
    };
    worth = returns_of(tensor_of(batch, "next.reward").squeeze(-1),
                       tensor_of(batch, "next.terminated").squeeze(-1),
                       tensor_of(batch, "next.done").squeeze(-1),
                       value_of(tensor_of(batch, "next.observation")))
                .reshape({-1, 1});
    advantage = worth - value_of(observation).reshape({-1, 1});
    observation = observation.reshape({-1, 4});
  }

  torch::Tensor observation, action, log_prob, worth, advantage;
};

torch::Tensor loss_of(Network& network, const Frames& frames, const torch::Tensor& cells) {
  const torch::Tensor features = network->features(frames.observation.index({cells}));
  const torch::Tensor all = torch::log_softmax(network->logits(features), -1);
  torch::Tensor advantage = frames.advantage.index({cells});
  advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8);
  const torch::Tensor ratio =
      (all.gather(-1, frames.action.index({cells})) - frames.log_prob.index({cells})).exp();
  const torch::Tensor gain =
      torch::min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean();
  const torch::Tensor error =
      (network->value(features) - frames.worth.index({cells})).square().mean();
  const torch::Tensor entropy = -(all * all.exp()).sum(-1).mean();
  return 0.25 * error - gain - 0.005 * entropy;
}

void learn(Network& network, torch::optim::Adam& optimizer, const pycollect::Batch& batch) {
  constexpr int kEpochs = 6;
  constexpr std::int64_t kMinibatch = 256;
  const Frames frames(network, batch);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (const torch::Tensor& cells : torch::randperm(batch.frames()).split(kMinibatch)) {
      optimizer.zero_grad();
      loss_of(network, frames, cells).backward();
      torch::nn::utils::clip_grad_norm_(network->parameters(), 0.5);
      optimizer.step();
    }
  }
}

}  // namespace

int main() {
  constexpr long long kBudget = 2'000'000;
  torch::manual_seed(1);
  torch::set_num_threads(1);  // the matrices are small
  Network network;
  torch::optim::Adam optimizer(network->parameters(), torch::optim::AdamOptions(1e-3));
  pycollect::Collector<CartPole> collector({.workers = 2, .envs = 8, .steps = 128, .seed = 3},
                                           Policy{network, {}});
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
    if (batch.header(0).sequence % 20 == 0) {
      std::printf("%8lld frames, mean return %.1f\n", collector.ledger().delivered, mean);
    }
    if (returns.size() == 100 && mean >= 475) {
      std::printf("%8lld frames, mean return %.1f: solved\n", collector.ledger().delivered, mean);
      return 0;
    }
    learn(network, optimizer, batch);
  }
  std::printf("not solved within %lld frames, mean return %.1f\n", kBudget, mean);
  return 1;
}
