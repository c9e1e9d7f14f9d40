// python_env: C++ environments for the collectors of the Python package.
//
//     #include <pycollect/python_env.h>
//
//     PYBIND11_MODULE(poles, module) { pycollect::python_env<Pole>(module, "Pole"); }
//
// defines a Python class. Python's collectors accept its objects, or callables that return one:
//
//     SyncDataCollector(lambda: poles.Pole(envs=64), policy, frames_per_batch=8192)
//
// Between two calls of the policy, the environments are stepped without the GIL and recorded
// without running Python code. One object is a batch of P environments for one worker of a
// collector. Only C types cross between the module and pycollect, so the two may use different
// compilers, standard libraries and forms of std::string.
//
// Needs pybind11, only in the module that includes this header; pycollect.h does not include it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pycollect/detail/any_env_batch.h"
#include "pycollect/detail/env_table.h"
#include "pycollect/env.h"
#include "pycollect/layout.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// The C++ type of the class's objects. It owns environments of type E, an Env or an EnvBatch, and a
// function that makes them. Neither copyable nor movable.
//
// If an EnvBatch has `void seed(std::span<const std::uint64_t> seeds)`, seeding calls it with one
// seed per environment. Otherwise seeding makes a new batch from one seed.
template <typename E>
  requires(Env<E> || EnvBatch<E>)
class PythonEnv {
 public:
  // Each<E> if E is an Env, otherwise E.
  using Environments = typename detail::EnvironmentsOf<E>::type;
  using Make = std::function<Environments(std::uint64_t seed)>;

  explicit PythonEnv(Make make, std::uint64_t seed = 0)
      : make_(std::move(make)),
        environments_(make_(seed)),
        envs_(environments_->envs()),
        observations_(views_of<TensorView>(environments_->observations())),
        actions_(views_of<ConstTensorView>(environments_->actions())),
        table_{this, &reset, &step} {}
  PythonEnv(const PythonEnv&) = delete;
  PythonEnv& operator=(const PythonEnv&) = delete;

  // The environments, for additional methods of the class. Do not use it while a collector uses
  // them.
  Environments& environments() { return *environments_; }

  // The interface that detail/env_table.h defines.
  pybind11::tuple described() {
    namespace py = pybind11;
    return py::make_tuple(detail::kEnvForm, PYCOLLECT_VERSION,
                          py::capsule(&table_, detail::kEnvTableName), envs_,
                          kSeedsEach ? envs_ : 1, leaves_of(environments_->observations()),
                          leaves_of(environments_->actions()));
  }
  void seed(const std::vector<std::uint64_t>& seeds) {
    if constexpr (kSeedsEach) {
      environments_->seed(std::span(seeds));
    } else {
      Environments made = make_(seeds.at(0));
      if (made.envs() != envs_) {
        throw std::logic_error("make: expected " + std::to_string(envs_) +
                               " environments as before, got " + std::to_string(made.envs()));
      }
      environments_.emplace(std::move(made));
    }
  }
  void raise() {
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) {
      std::rethrow_exception(error);
    }
  }
  std::int64_t envs() const { return envs_; }

 private:
  static constexpr bool kSeedsEach =
      requires(Environments& batch, std::span<const std::uint64_t> seeds) { batch.seed(seeds); };

  // Views with addresses that are set later.
  template <typename View>
  std::vector<View> views_of(const std::vector<Leaf>& leaves) {
    std::vector<View> views;
    for (const Leaf& leaf : leaves) {
      Dims shape{envs_};
      for (const std::int64_t extent : leaf.shape) {
        shape.push_back(extent);
      }
      views.push_back(View::contiguous(nullptr, leaf.dtype, shape));
    }
    return views;
  }

  static pybind11::list leaves_of(const std::vector<Leaf>& leaves) {
    namespace py = pybind11;
    py::list result;
    for (const Leaf& leaf : leaves) {
      py::list key, shape;
      for (const std::string& name : leaf.key) {
        key.append(name);
      }
      for (const std::int64_t extent : leaf.shape) {
        shape.append(extent);
      }
      result.append(
          py::make_tuple(py::tuple(key), std::string(name_of(leaf.dtype)), py::tuple(shape)));
    }
    return result;
  }

  // Returns 1 if the call succeeds. Otherwise keeps the exception for raise() and returns 0.
  template <typename Call>
  int guarded(const Call& call) noexcept {
    try {
      call();
      return 1;
    } catch (...) {
      error_ = std::current_exception();
      return 0;
    }
  }

  std::span<const TensorView> at(void* const* addresses) {
    for (std::size_t i = 0; i < observations_.size(); ++i) {
      observations_[i].data = static_cast<std::byte*>(addresses[i]);
    }
    return observations_;
  }

  static int reset(void* self, const std::uint8_t* mask, void* const* observations) {
    auto& env = *static_cast<PythonEnv*>(self);
    return env.guarded([&] {
      const auto count = static_cast<std::size_t>(env.envs_);
      env.environments_->reset(std::span(mask, count), env.at(observations));
    });
  }

  static int step(void* self, const void* const* actions, void* const* observations,
                  double* rewards, std::uint8_t* terminated, std::uint8_t* truncated) {
    auto& env = *static_cast<PythonEnv*>(self);
    return env.guarded([&] {
      const auto count = static_cast<std::size_t>(env.envs_);
      for (std::size_t i = 0; i < env.actions_.size(); ++i) {
        env.actions_[i].data = static_cast<const std::byte*>(actions[i]);
      }
      env.environments_->step(env.actions_, env.at(observations), std::span(rewards, count),
                              std::span(terminated, count), std::span(truncated, count));
    });
  }

  Make make_;
  std::optional<Environments> environments_;
  const std::int64_t envs_;
  std::vector<TensorView> observations_;
  std::vector<ConstTensorView> actions_;
  std::exception_ptr error_;
  const detail::EnvTable table_;
};

// Adds the class to a module. If the environments are constructible from these arguments, as in a
// Collector, objects are made by `name(envs, seed=0)`. For other arguments, define a constructor:
//
//     pycollect::python_env<Walkers>(module, "Walkers")
//         .def(py::init([](std::int64_t envs, double wind) {
//           return std::make_unique<pycollect::PythonEnv<Walkers>>(
//               [=](std::uint64_t seed) { return Walkers(envs, wind, seed); });
//         }));
//
// Collectors use two optional attributes of the class or its objects. `action_space` is the
// Gymnasium space of one environment's action; random actions need it. `close()` is called when a
// collector no longer needs the object.
template <typename E>
  requires(Env<E> || EnvBatch<E>)
pybind11::class_<PythonEnv<E>> python_env(pybind11::handle module, const char* name) {
  namespace py = pybind11;
  using Environments = typename PythonEnv<E>::Environments;
  py::class_<PythonEnv<E>> type(module, name, "C++ environments for pycollect's collectors.");
  if constexpr (std::constructible_from<Environments, std::int64_t, std::uint64_t>) {
    type.def(py::init([](std::int64_t envs, std::uint64_t seed) {
               const auto make = [envs](std::uint64_t s) { return Environments(envs, s); };
               return std::make_unique<PythonEnv<E>>(make, seed);
             }),
             py::arg("envs"), py::arg("seed") = 0);
  }
  type.def_property_readonly("num_envs", &PythonEnv<E>::envs)
      .def(detail::kEnvMethod, &PythonEnv<E>::described)
      .def("_seed", &PythonEnv<E>::seed)
      .def("_raise", &PythonEnv<E>::raise);
  return type;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
