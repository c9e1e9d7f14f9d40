// P CartPoles, the outputs of their policy, and the arrays that hold both.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace pycollect::benchmarks {

// A random generator so cheap that it does not affect the measurement.
class Random {
 public:
  std::uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  // From -0.05 to 0.05.
  float small() { return static_cast<float>(next() >> 40) * (0.1F / 16777216.0F) - 0.05F; }

 private:
  std::uint64_t state_ = 0x9e3779b97f4a7c15ULL;
};

// Barto, Sutton and Anderson's cart and pole, with the constants of Gymnasium's CartPole-v1.
struct CartPole {
  float state[4];
  int steps;

  void reset(Random& random) {
    for (float& number : state) {
      number = random.small();
    }
    steps = 0;
  }

  void step(std::int64_t action) {
    const float force = action == 1 ? 10.0F : -10.0F;
    const float cosine = std::cos(state[2]);
    const float sine = std::sin(state[2]);
    const float push = (force + 0.05F * state[3] * state[3] * sine) / 1.1F;
    const float turn =
        (9.8F * sine - cosine * push) / (0.5F * (4.0F / 3.0F - 0.1F * cosine * cosine / 1.1F));
    state[0] += 0.02F * state[1];
    state[1] += 0.02F * (push - 0.05F * turn * cosine / 1.1F);
    state[2] += 0.02F * state[3];
    state[3] += 0.02F * turn;
    ++steps;
  }

  bool terminated() const { return std::abs(state[0]) > 2.4F || std::abs(state[2]) > 0.2095F; }
  bool truncated() const { return steps >= 500; }
};

// P environments with arrays of one step. Actions are random. The policy's other outputs are set
// only once, because only their copies are to be measured.
struct CartPoles {
  explicit CartPoles(std::size_t count)
      : poles(count),
        observation(4 * count),
        action(count),
        log_prob(count, -0.7F),
        value(count, 1.0F),
        reward(count, 1.0F),
        terminated(count),
        truncated(count) {
    for (std::size_t p = 0; p < count; ++p) {
      reset(p);
    }
  }

  void choose(std::size_t p) { action[p] = static_cast<std::int64_t>(random.next() >> 63); }

  // Returns whether the episode ended there.
  bool step(std::size_t p) {
    poles[p].step(action[p]);
    terminated[p] = static_cast<std::uint8_t>(poles[p].terminated());
    truncated[p] = static_cast<std::uint8_t>(poles[p].truncated());
    show(p);
    return (terminated[p] | truncated[p]) != 0;
  }

  void reset(std::size_t p) {
    poles[p].reset(random);
    show(p);
  }

  void show(std::size_t p) {
    std::memcpy(&observation[4 * p], poles[p].state, sizeof(poles[p].state));
  }

  std::vector<CartPole> poles;
  Random random;
  std::vector<float> observation;  // [P, 4]
  std::vector<std::int64_t> action;
  std::vector<float> log_prob, value, reward;
  std::vector<std::uint8_t> terminated, truncated;
};

}  // namespace pycollect::benchmarks
