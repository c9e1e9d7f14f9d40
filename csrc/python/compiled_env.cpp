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

// The environments' own description.
struct CompiledEnv::Description {
  explicit Description(const py::object& owner) {
    const py::tuple fields = owner.attr(detail::kEnvMethod)();
    const int form = fields[0].cast<int>();
    if (form != detail::kEnvForm) {
      throw std::invalid_argument("create_env_fn: expected environments compiled with form " +
                                  std::to_string(detail::kEnvForm) +
                                  " of pycollect/python_env.h (pycollect " +
                                  std::string(version()) + "), got form " + std::to_string(form) +
                                  " (pycollect " + fields[1].cast<std::string>() +
                                  "); compile their module against the installed pycollect");
    }
    const auto capsule = fields[2].cast<py::capsule>();
    table =
        static_cast<const EnvTable*>(PyCapsule_GetPointer(capsule.ptr(), detail::kEnvTableName));
    if (table == nullptr) {
      throw py::error_already_set();
    }
    envs = fields[3].cast<std::int64_t>();
    seeds = fields[4].cast<std::int64_t>();
    observations = leaves(fields[5]);
    actions = leaves(fields[6]);
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

// The environments threw an exception, which their module has stored.
struct EnvThrew : std::exception {};

// Environments that are called through their EnvTable.
class TableEnvs final : public detail::AnyEnvBatch {
 public:
  TableEnvs(const EnvTable* table, std::int64_t envs, std::vector<Leaf> observations,
            std::vector<Leaf> actions)
      : table_(table),
        envs_(envs),
        observations_(std::move(observations)),
        actions_(std::move(actions)),
        observed_(observations_.size()),
        chosen_(actions_.size()) {}

  std::int64_t envs() override { return envs_; }
  std::vector<Leaf> observations() override { return observations_; }
  std::vector<Leaf> actions() override { return actions_; }

  void reset(std::span<const std::uint8_t> mask, std::span<const TensorView> views) override {
    check(table_->reset(table_->environments, mask.data(), addresses(views)));
  }

  void step(std::span<const ConstTensorView> actions, std::span<const TensorView> views,
            std::span<double> rewards, std::span<std::uint8_t> terminated,
            std::span<std::uint8_t> truncated) override {
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
      chosen_[i] = actions[i].data;
    }
    check(table_->step(table_->environments, chosen_.data(), addresses(views), rewards.data(),
                       terminated.data(), truncated.data()));
  }

 private:
  void* const* addresses(std::span<const TensorView> views) {
    for (std::size_t i = 0; i < observed_.size(); ++i) {
      observed_[i] = views[i].data;
    }
    return observed_.data();
  }

  static void check(int succeeded) {
    if (succeeded == 0) {
      throw EnvThrew();
    }
  }

  const EnvTable* table_;
  std::int64_t envs_;
  std::vector<Leaf> observations_, actions_;
  std::vector<void*> observed_;
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

// Lets the environments read the action in place if its memory is as they expect, and copies it
// otherwise.
void CompiledEnv::take(std::size_t place, const ConstTensorView& action) {
  const TensorView& room = room_[place];
  if (action.dtype == room.dtype && action.shape == room.shape && action.is_contiguous() &&
      action.device == room.device) {
    actions_[place].data = action.data;
  } else {
    copy(room, action);  // throws if the shape differs or the memory is not on the host
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
    throw std::invalid_argument("given: expected the positions of " +
                                std::to_string(actions_.size()) + " actions, got " +
                                std::to_string(given.size()));
  }
  for (std::size_t i = 0; i < actions_.size(); ++i) {
    if (given[i] >= outputs.size()) {
      throw std::invalid_argument("given: expected positions among " +
                                  std::to_string(outputs.size()) + " outputs, got " +
                                  std::to_string(given[i]));
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
