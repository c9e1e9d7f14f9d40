// AnyEnvBatch: an EnvBatch with its type erased.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pycollect/env.h"
#include "pycollect/layout.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::detail {

// The methods of an EnvBatch, as virtual functions.
class AnyEnvBatch {
 public:
  virtual ~AnyEnvBatch() = default;
  virtual std::int64_t envs() = 0;
  virtual std::vector<Leaf> observations() = 0;
  virtual std::vector<Leaf> actions() = 0;
  virtual void reset(std::span<const std::uint8_t> mask, std::span<const TensorView> views) = 0;
  virtual void step(std::span<const ConstTensorView> actions, std::span<const TensorView> views,
                    std::span<double> rewards, std::span<std::uint8_t> terminated,
                    std::span<std::uint8_t> truncated) = 0;
};

template <EnvBatch B>
class Wrapped final : public AnyEnvBatch {
 public:
  explicit Wrapped(B batch) : batch_(std::move(batch)) {}

  std::int64_t envs() override { return batch_.envs(); }
  std::vector<Leaf> observations() override { return batch_.observations(); }
  std::vector<Leaf> actions() override { return batch_.actions(); }
  void reset(std::span<const std::uint8_t> mask, std::span<const TensorView> views) override {
    batch_.reset(mask, views);
  }
  void step(std::span<const ConstTensorView> actions, std::span<const TensorView> views,
            std::span<double> rewards, std::span<std::uint8_t> terminated,
            std::span<std::uint8_t> truncated) override {
    batch_.step(actions, views, rewards, terminated, truncated);
  }

  B& batch() { return batch_; }

 private:
  B batch_;
};

template <typename E>
struct EnvironmentsOf {
  using type = E;
};
template <Env E>
struct EnvironmentsOf<E> {
  using type = Each<E>;
};

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
