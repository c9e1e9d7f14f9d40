// logged_env: environments that log their steps, so that batches can be compared with the log.
#include <pycollect/python_env.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Episode e of environment p ends with its step p + e + 1: terminated if e is even, truncated if e
// is odd.
struct Logged {
  // The process id is appended to the path.
  Logged(std::int64_t count, const std::string& path)
      : seeds(static_cast<std::size_t>(count)),
        episode(seeds.size(), -1),
        steps(seeds.size()),
        log(std::make_unique<std::ofstream>(path + "." + std::to_string(getpid()))) {}

  std::int64_t envs() const { return static_cast<std::int64_t>(seeds.size()); }
  std::vector<pycollect::Leaf> observations() const {
    return {{"count", pycollect::DType::int64, {3}}, {"level", pycollect::DType::float64, {}}};
  }
  std::vector<pycollect::Leaf> actions() const {
    return {{"action", pycollect::DType::float32, {2}}};
  }
  void seed(std::span<const std::uint64_t> given) { seeds.assign(given.begin(), given.end()); }

  void observe(std::size_t p, std::span<const pycollect::TensorView> views, double level) {
    const std::int64_t now[] = {static_cast<std::int64_t>(seeds[p]), episode[p], steps[p]};
    std::copy(std::begin(now), std::end(now), views[0].as<std::int64_t>() + 3 * p);
    views[1].as<double>()[p] = level;
  }

  void reset(std::span<const std::uint8_t> mask, std::span<const pycollect::TensorView> views) {
    for (std::size_t p = 0; p < seeds.size(); ++p) {
      if (mask[p] != 0) {
        ++episode[p];
        steps[p] = 0;
        observe(p, views, 0);
      }
    }
  }

  void step(std::span<const pycollect::ConstTensorView> chosen,
            std::span<const pycollect::TensorView> views, std::span<double> rewards,
            std::span<std::uint8_t> terminated, std::span<std::uint8_t> truncated) {
    const float* action = chosen[0].as<float>();
    for (std::size_t p = 0; p < seeds.size(); ++p, action += 2) {
      if (action[0] > 1e6F) {
        throw std::out_of_range("an action of more than a million");
      }
      const bool over = ++steps[p] == static_cast<std::int64_t>(p) + episode[p] + 1;
      rewards[p] = action[0] + 0.5;
      terminated[p] = static_cast<std::uint8_t>(over && episode[p] % 2 == 0);
      truncated[p] = static_cast<std::uint8_t>(over && episode[p] % 2 == 1);
      observe(p, views, action[0] - action[1]);
      *log << seeds[p] << ' ' << episode[p] << ' ' << steps[p] << ' ' << action[0] << ' '
           << action[1] << ' ' << rewards[p] << ' ' << int{terminated[p]} << ' '
           << int{truncated[p]} << ' ' << PyGILState_Check() << '\n';
    }
    log->flush();
  }

  std::vector<std::uint64_t> seeds;
  std::vector<std::int64_t> episode, steps;
  std::unique_ptr<std::ofstream> log;
};

}  // namespace

PYBIND11_MODULE(logged_env, module) {
  using Env = pycollect::PythonEnv<Logged>;
  pycollect::python_env<Logged>(module, "Logged")
      .def(pybind11::init([](std::int64_t envs, const std::string& path) {
             return std::make_unique<Env>([=](std::uint64_t) { return Logged(envs, path); });
           }),
           pybind11::arg("envs"), pybind11::arg("path"));
}
