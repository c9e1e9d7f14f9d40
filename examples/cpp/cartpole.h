// CartPole-v1 as an environment for pycollect: a pole on a cart, at most 500 steps.
#pragma once

#include <pycollect/env.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>

struct CartPole {
  using Number = float;
  using Action = std::int64_t;  // 0: push to the left, 1: to the right
  static constexpr std::size_t kObservation = 4;

  explicit CartPole(std::uint64_t seed) : random(static_cast<unsigned>(seed) + 1) {}

  void reset(std::span<float, 4> s) {
    for (float& x : s) {
      x = std::uniform_real_distribution<float>(-0.05F, 0.05F)(random);
    }
    steps = 0;
  }

  // A. G. Barto, R. S. Sutton and C. W. Anderson (1983), in steps of 20 ms.
  pycollect::Outcome step(std::int64_t action, std::span<float, 4> s) {
    const float force = action == 1 ? 10.0F : -10.0F;
    const float cosine = std::cos(s[2]), sine = std::sin(s[2]);
    const float push = (force + 0.05F * s[3] * s[3] * sine) / 1.1F;
    const float turn =
        (9.8F * sine - cosine * push) / (0.5F * (4.0F / 3.0F - 0.1F * cosine * cosine / 1.1F));
    s[0] += 0.02F * s[1];
    s[1] += 0.02F * (push - 0.05F * turn * cosine / 1.1F);
    s[2] += 0.02F * s[3];
    s[3] += 0.02F * turn;
    return {.reward = 1,
            .terminated = std::abs(s[0]) > 2.4F || std::abs(s[2]) > 0.2095F,
            .truncated = ++steps >= 500};
  }

  std::minstd_rand random;
  int steps = 0;
};
