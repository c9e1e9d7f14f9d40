#include "compiled_env.h"

#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "interop.h"
#include "pycollect/copy.h"
#include "pycollect/version.h"

namespace pycollect::python {

using detail::EnvTable;

// What the object says of its environments.
struct CompiledEnv::Description {
  explicit Description(const py::object& owner) {
    const py::tuple said = owner.attr(detail::kEnvMethod)();
    const int form = said[0].cast<int>();
    if (form != detail::kEnvForm) {
      throw std::invalid_argument(
          "create_env_fn: expected environments compiled with form " +
          std::to_string(detail::kEnvForm) + " of pycollect/python_env.h (pycollect " +
          std::string(version()) + "), got form " + std::to_string(form) + " (pycollect " +
          said[1].cast<std::string>() + "); compile their module against the installed pycollect");
    }
    const auto capsule = said[2].cast<py::capsule>();
    table =
        static_cast<const EnvTable*>(PyCapsule_GetPointer(capsule.ptr(), detail::kEnvTableName));
    if (table == nullptr) {
      throw py::error_already_set();
    }
    envs = said[3].cast<std::int64_t>();
    seeds = said[4].cast<std::int64_t>();
    observations = leaves(said[5]);
    actions = leaves(said[6]);
  }

  static std::vector<Leaf> leaves(py::handle described) {
    std::vector<Leaf> result;
    for (const py::handle leaf : described) {
      const auto fields = py::reinterpret_borrow<py::tuple>(leaf);
      result.push_back(leaf_from(fields[0], fields[1].cast<std::string>(),
                                 fields[2].cast<std::vector<std::int64_t>>()));
    }
    return result;
  }

  const EnvTable* table;
  std::int64_t envs;
  std::int64_t seeds;
  std::vector<Leaf> observations, actions;
};

namespace {

// They threw: what, their module knows.
struct EnvThrew : std::exception {};

// Environments behind their table.
class TableEnvs final : public detail::AnyEnvBatch {
 public:
  TableEnvs(const EnvTable* table, std::int64_t envs, std::vector<Leaf> observations,
            std::vector<Leaf> actions)
      : table_(table),
        envs_(envs),
        observations_(std::move(observations)),
        actions_(std::move(actions)),
        shown_(observations_.size()),
        chosen_(actions_.size()) {}

  std::int64_t envs() override { return envs_; }
  std::vector<Leaf> observations() override { return observations_; }
  std::vector<Leaf> actions() override { return actions_; }

  void reset(std::span<const std::uint8_t> mask, std::span<const TensorView> views) override {
    check(table_->reset(table_->environments, mask.data(), shown(views)));
  }

  void step(std::span<const ConstTensorView> actions, std::span<const TensorView> views,
            std::span<double> rewards, std::span<std::uint8_t> terminated,
            std::span<std::uint8_t> truncated) override {
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
      chosen_[i] = actions[i].data;
    }
    check(table_->step(table_->environments, chosen_.data(), shown(views), rewards.data(),
                       terminated.data(), truncated.data()));
  }

 private:
  void* const* shown(std::span<const TensorView> views) {
    for (std::size_t i = 0; i < shown_.size(); ++i) {
      shown_[i] = views[i].data;
    }
    return shown_.data();
  }

  static void check(int ended_well) {
    if (ended_well == 0) {
      throw EnvThrew();
    }
  }

  const EnvTable* table_;
  std::int64_t envs_;
  std::vector<Leaf> observations_, actions_;
  std::vector<void*> shown_;
  std::vector<const void*> chosen_;
};

}  // namespace

CompiledEnv::CompiledEnv(py::object owner) : CompiledEnv(Description(owner), owner) {}

CompiledEnv::CompiledEnv(const Description& described, py::object owner)
    : owner_(std::move(owner)),
      envs_(std::make_unique<TableEnvs>(described.table, described.envs, described.observations,
                                        described.actions)),
      seeds_(described.seeds),
      room_(described.envs, described.actions),
      actions_(room_.views().begin(), room_.views().end()) {}

template <typename Call>
void CompiledEnv::released(const Call& call) {
  try {
    const py::gil_scoped_release release;
    call();
  } catch (const EnvThrew&) {
    owner_.attr("_raise")();
    throw std::runtime_error("the environments threw an exception, but their module raised none");
  }
}

void CompiledEnv::reset_all() {
  released([this] { envs_.reset_all(); });
}

void CompiledEnv::reset(std::span<const std::uint8_t> mask) {
  if (static_cast<std::int64_t>(mask.size()) != envs_.envs()) {
    throw std::invalid_argument("done: expected " + std::to_string(envs_.envs()) + " flags, got " +
                                std::to_string(mask.size()));
  }
  released([&] { envs_.reset(mask); });
}

// Environments read where the action lies, if it lies as they want it.
void CompiledEnv::take(std::size_t place, const ConstTensorView& action) {
  const TensorView& room = room_[place];
  if (action.dtype == room.dtype && action.shape == room.shape && action.is_contiguous() &&
      action.device == room.device) {
    actions_[place].data = action.data;
  } else {
    copy(room, action);  // throws where it has another shape, or is not in host memory
    actions_[place].data = room.data;
  }
}

void CompiledEnv::step(std::span<const ConstTensorView> actions) {
  if (actions.size() != actions_.size()) {
    throw std::invalid_argument("actions: expected " + std::to_string(actions_.size()) +
                                " arrays, got " + std::to_string(actions.size()));
  }
  for (std::size_t i = 0; i < actions.size(); ++i) {
    take(i, actions[i]);
  }
  released([this] { envs_.step(actions_); });
}

std::int64_t CompiledEnv::step(Recorder& recorder, const std::vector<std::size_t>& given,
                               std::span<const ConstTensorView> outputs,
                               std::span<const ConstTensorView> states) {
  if (given.size() != actions_.size()) {
    throw std::invalid_argument("given: expected the places of " + std::to_string(actions_.size()) +
                                " actions, got " + std::to_string(given.size()));
  }
  for (std::size_t i = 0; i < actions_.size(); ++i) {
    if (given[i] >= outputs.size()) {
      throw std::invalid_argument("given: expected places of " + std::to_string(outputs.size()) +
                                  " outputs, got " + std::to_string(given[i]));
    }
    take(i, outputs[given[i]]);
  }
  std::int64_t due = 0;
  envs_.set_policy_data(outputs, states);
  released([&] {
    envs_.step(actions_);
    due = envs_.record(recorder);
  });
  return due;
}

}  // namespace pycollect::python
