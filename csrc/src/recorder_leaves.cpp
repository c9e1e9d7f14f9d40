#include "pycollect/detail/recorder_leaves.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

Key next_of(const Key& key) { return Key("next") / key; }

// The leaves of a layout, by key.
struct Rows {
  const Layout& layout;
  std::int64_t envs;
  bool batched;

  LeafRows of(const Key& key) const {
    const int index = layout.find(key);
    if (index < 0) {
      throw std::invalid_argument("layout: expected a leaf " + to_string(key) +
                                  ", which is missing");
    }
    const auto i = static_cast<std::size_t>(index);
    return {layout[i], i, envs, batched};
  }

  // A leaf that the recorder computes: one number of this type per frame.
  LeafRows number(const Key& key, DType dtype) const {
    LeafRows rows = of(key);
    if (rows.leaf().dtype != dtype ||
        rows.frame_bytes() != static_cast<std::int64_t>(item_size(dtype))) {
      throw std::invalid_argument("layout: expected " + to_string(key) + " to be one " +
                                  std::string(name_of(dtype)) + " per frame, got " +
                                  std::string(name_of(rows.leaf().dtype)) + " of shape " +
                                  to_string(rows.leaf().shape));
    }
    return rows;
  }

  // The reward: one number per frame, or one per objective.
  LeafRows reward() const {
    LeafRows rows = of({"next", "reward"});
    if (rows.leaf().dtype != DType::float32 || rows.frame_bytes() == 0) {
      throw std::invalid_argument("layout: expected next.reward to have float32 numbers, got " +
                                  std::string(name_of(rows.leaf().dtype)) + " of shape " +
                                  to_string(rows.leaf().shape));
    }
    return rows;
  }

  std::optional<LeafRows> if_any(const Key& key) const {
    return layout.find(key) < 0 ? std::nullopt : std::optional(of(key));
  }

  std::optional<LeafRows> number_if_any(const Key& key, DType dtype) const {
    return layout.find(key) < 0 ? std::nullopt : std::optional(number(key, dtype));
  }

  // The root leaf of an observation or a state; nothing if the key is an output.
  std::optional<LeafRows> root_of(const Key& key, const std::vector<Key>& outputs) const {
    const bool is_output = std::find(outputs.begin(), outputs.end(), key) != outputs.end();
    return is_output ? std::nullopt : std::optional(of(key));
  }

  // The caller's memory for one step of this leaf.
  LeafRows bound(const Key& key, const TensorView& memory) const {
    LeafRows result = of(key);
    result.bind(memory);
    return result;
  }

  // The caller's memory for one step of `root`. Without a root, the memory itself defines dtype and
  // shape.
  LeafRows bound_as(const std::optional<LeafRows>& root, const Key& key,
                    const TensorView& memory) const {
    const Dims frame(memory.shape.from(batched ? 1 : 0));
    LeafRows result = root ? *root : LeafRows({key, memory.dtype, frame}, 0, envs, batched);
    result.bind(memory);
    return result;
  }
};

// Checks that both leaves have the same dtype and shape, because the recorder writes one array to
// both.
void expect_same_form(const std::optional<LeafRows>& next, const LeafRows& current) {
  const auto form = [](const LeafRows& rows) {
    return std::string(name_of(rows.leaf().dtype)) + " of shape " + to_string(rows.leaf().shape);
  };
  if (next && form(*next) != form(current)) {
    throw std::invalid_argument(to_string(next->leaf().key) + ": expected " + form(current) +
                                ", the same as " + to_string(current.leaf().key) + ", got " +
                                form(*next));
  }
}

// `has_twin`: there are two specs with this key, of which one is carried and the other is not.
RecorderLeaves::Observation observation_of(const ObservationSpec& spec, bool has_twin,
                                           const std::vector<Key>& outputs, const Rows& rows) {
  const Key next_key = next_of(spec.key);
  if (!spec.carried) {
    return {std::nullopt,
            has_twin ? rows.if_any(next_key) : rows.of(next_key),
            std::nullopt,
            {},
            false};
  }
  std::optional<LeafRows> root = rows.root_of(spec.key, outputs);
  std::optional<LeafRows> next = has_twin ? std::nullopt : rows.if_any(next_key);
  LeafRows current = rows.bound_as(root, spec.key, spec.current);
  expect_same_form(next, current);
  return {std::move(root), std::move(next), std::move(current), spec.current, spec.live};
}

bool has_twin(const ObservationSpec& spec, const std::vector<ObservationSpec>& specs) {
  return std::any_of(specs.begin(), specs.end(), [&](const ObservationSpec& other) {
    return other.carried != spec.carried && other.key == spec.key;
  });
}

RecorderLeaves::State state_of(const StateSpec& spec, const std::vector<Key>& outputs,
                               const Rows& rows) {
  std::optional<LeafRows> root, next;
  if (spec.recorded) {
    root = rows.root_of(spec.key, outputs);
    next = rows.if_any(next_of(spec.key));
  }
  LeafRows current = rows.bound_as(root, spec.key, spec.current);
  expect_same_form(next, current);
  ConstTensorView initial = spec.initial;
  if (rows.batched && initial.shape == current.leaf().shape) {  // one frame for all environments
    Dims strides{0};
    for (std::int64_t stride : initial.strides) {
      strides.push_back(stride);
    }
    initial.shape = current.step_shape();
    initial.strides = strides;
  }
  const Fit fit = current.check(initial, true);
  return {std::move(root), std::move(next), std::move(current), spec.current, initial, fit};
}

RecorderLeaves::Standard standard_of(const Rows& rows) {
  const auto flag = [&rows](const Key& key) { return rows.number(key, DType::boolean); };
  return {rows.reward(),
          flag({"next", "done"}),
          flag({"next", "terminated"}),
          flag({"next", "truncated"}),
          {flag({"done"}), flag({"terminated"}), flag({"truncated"})}};
}

// All leaves that are written, each once.
std::vector<LeafRows*> all_of(RecorderLeaves& leaves) {
  std::vector<LeafRows*> all{&leaves.ids};
  for (RecorderLeaves::Observation& observation : leaves.observations) {
    for (std::optional<LeafRows>* leaf : {&observation.root, &observation.next}) {
      if (*leaf) {
        all.push_back(&**leaf);
      }
    }
  }
  for (RecorderLeaves::State& state : leaves.states) {
    for (std::optional<LeafRows>* leaf : {&state.root, &state.next}) {
      if (*leaf) {
        all.push_back(&**leaf);
      }
    }
  }
  if (leaves.is_init) {
    all.push_back(&leaves.is_init->root);
  }
  if (leaves.standard) {
    RecorderLeaves::Standard& standard = *leaves.standard;
    for (LeafRows* leaf :
         {&standard.reward, &standard.done, &standard.terminated, &standard.truncated}) {
      all.push_back(leaf);
    }
    for (LeafRows& flag : standard.root_flags) {
      all.push_back(&flag);
    }
  }
  for (std::optional<LeafRows>* leaf :
       {&leaves.step_count, &leaves.next_step_count, &leaves.version, &leaves.mask}) {
    if (*leaf) {
      all.push_back(&**leaf);
    }
  }
  for (std::vector<LeafRows>* group : {&leaves.outputs, &leaves.elsewhere}) {
    for (LeafRows& leaf : *group) {
      all.push_back(&leaf);
    }
  }
  return all;
}

// Checks that every leaf of the layout is written by exactly one part of the recorder.
void check_each_once(const Layout& layout, const std::vector<LeafRows*>& written) {
  std::vector<int> writers(layout.size());
  for (const LeafRows* leaf : written) {
    ++writers[static_cast<std::size_t>(layout.find(leaf->leaf().key))];
  }
  for (std::size_t i = 0; i < layout.size(); ++i) {
    if (writers[i] != 1) {
      throw std::invalid_argument(
          "layout: expected leaves that are written exactly once, but " + to_string(layout[i].key) +
          (writers[i] == 0 ? " is never written" : " is written several times"));
    }
  }
}

// The rewards and ends among the observations; nothing if the recorder gets them with each step.
std::optional<StepSummary> summary_of(const std::vector<ObservationSpec>& specs,
                                      const std::vector<RecorderLeaves::Observation>& observations,
                                      const RecorderOptions& options) {
  StepSummary summary(options.envs);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::optional<LeafRows>& written = observations[i].written();
    if (!written) {
      continue;
    }
    const LeafRows& leaf = *written;
    if (specs[i].meaning == Meaning::end) {
      summary.add_end(i, leaf);
    } else if (specs[i].meaning == Meaning::reward) {
      summary.add_reward(i, leaf);
    }
  }
  if (summary.has_rewards() && !summary.has_ends()) {
    throw std::invalid_argument(
        "observations: expected one with the meaning `end`, because others have the meaning "
        "`reward`");
  }
  return summary.has_ends() ? std::optional(std::move(summary)) : std::nullopt;
}

}  // namespace

RecorderLeaves::RecorderLeaves(const Layout& layout,
                               const std::vector<ObservationSpec>& observation_specs,
                               const std::vector<Key>& output_keys, const RecorderOptions& options,
                               const std::vector<StateSpec>& state_specs,
                               const std::optional<TensorView>& is_init_memory,
                               const std::optional<TensorView>& step_count_memory,
                               const std::vector<Key>& elsewhere_keys)
    : ids(Rows{layout, options.envs, options.has_env_dimension()}.number({"collector", "traj_ids"},
                                                                         DType::int64)) {
  if (options.envs < 1) {
    throw std::invalid_argument("envs: expected >= 1, got " + std::to_string(options.envs));
  }
  if (options.max_frames_per_traj < 0) {
    throw std::invalid_argument("max_frames_per_traj: expected at least 1, or 0 for none, got " +
                                std::to_string(options.max_frames_per_traj));
  }
  const std::int64_t all_envs = options.envs_of_worker();
  if (options.first_env < 0 || options.envs > all_envs ||
      options.first_env > all_envs - options.envs) {
    throw std::invalid_argument("first_env: expected a range of " + std::to_string(options.envs) +
                                " in " + std::to_string(all_envs) + " environments, got one from " +
                                std::to_string(options.first_env));
  }
  const Rows rows{layout, options.envs, options.has_env_dimension()};
  for (const ObservationSpec& spec : observation_specs) {
    observations.push_back(
        observation_of(spec, has_twin(spec, observation_specs), output_keys, rows));
  }
  summary = summary_of(observation_specs, observations, options);
  for (const Key& key : output_keys) {
    outputs.push_back(rows.of(key));
  }
  for (const StateSpec& spec : state_specs) {
    states.push_back(state_of(spec, output_keys, rows));
  }
  if (!summary) {
    standard = standard_of(rows);
  }
  if (is_init_memory) {
    is_init = IsInit{rows.number({"is_init"}, DType::boolean),
                     rows.bound({"is_init"}, *is_init_memory), *is_init_memory};
  }
  version = rows.number_if_any({"collector", "policy_version"}, DType::int64);
  mask = rows.number_if_any({"collector", "mask"}, DType::boolean);
  const bool is_observed =
      std::any_of(observation_specs.begin(), observation_specs.end(),
                  [](const ObservationSpec& spec) { return spec.key == Key{"step_count"}; });
  if (!summary && !is_observed) {
    step_count = rows.number_if_any({"step_count"}, DType::int64);
    next_step_count = rows.number_if_any({"next", "step_count"}, DType::int64);
  }
  if (step_count_memory) {
    steps_had = rows.bound({"step_count"}, *step_count_memory);
  }
  for (const Key& key : elsewhere_keys) {
    elsewhere.push_back(rows.of(key));
  }
  all = all_of(*this);
  check_each_once(layout, all);
}

void RecorderLeaves::bind(Slab& slab, std::int64_t row, std::int64_t first_env) {
  for (LeafRows* leaf : all) {
    leaf->bind(slab, row, first_env);
  }
}

void RecorderLeaves::flush() {
  for (LeafRows* leaf : all) {
    leaf->flush();
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
