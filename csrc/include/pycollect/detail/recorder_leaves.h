// RecorderLeaves: the leaves of a recorder's layout, grouped by their contents.
//
// The constructor checks the description of the environment and its policy against the layout.
// Afterwards the leaves are bound to the rows of one slab after another.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pycollect/detail/leaf_rows.h"
#include "pycollect/detail/step_summary.h"
#include "pycollect/layout.h"
#include "pycollect/recorder_options.h"
#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Neither copyable nor movable, because `all` points into it.
struct RecorderLeaves {
  struct Observation {
    std::optional<LeafRows> root;
    std::optional<LeafRows> next;
    std::optional<LeafRows> current;
    ConstTensorView view;  // of `current`
    bool live;

    // The leaf that determines the expected form; empty if nothing of it is recorded.
    const std::optional<LeafRows>& written() const { return next ? next : current; }

    // Writes a checked value for the next action, unless it is in that memory already.
    void write_current(const ConstTensorView& value, Fit fit) {
      if (!current->is_memory_of(value, fit)) {
        current->write(0, value, fit);
      }
    }
  };
  struct State {
    std::optional<LeafRows> root;
    std::optional<LeafRows> next;
    LeafRows current;
    ConstTensorView view;     // of `current`
    ConstTensorView initial;  // has the shape of `current`
    Fit initial_fit;

    const LeafRows& written() const { return next ? *next : current; }
  };
  struct Standard {  // reward and flags that the recorder writes itself
    LeafRows reward, done, terminated, truncated;
    std::vector<LeafRows> root_flags;

    std::size_t objectives() const {
      return static_cast<std::size_t>(reward.frame_bytes()) / sizeof(float);
    }
  };
  struct IsInit {
    LeafRows root;
    LeafRows current;
    ConstTensorView view;
  };

  // Has the arguments and exceptions of Recorder's constructor.
  RecorderLeaves(const Layout& layout, const std::vector<ObservationSpec>& observation_specs,
                 const std::vector<Key>& output_keys, const RecorderOptions& options,
                 const std::vector<StateSpec>& state_specs,
                 const std::optional<TensorView>& is_init_memory,
                 const std::optional<TensorView>& step_count_memory,
                 const std::vector<Key>& elsewhere_keys);
  RecorderLeaves(const RecorderLeaves&) = delete;
  RecorderLeaves& operator=(const RecorderLeaves&) = delete;

  // Binds the leaves to this row of the slab, starting at this environment.
  void bind(Slab& slab, std::int64_t row, std::int64_t first_env);
  // Completes all writes since bind().
  void flush();

  std::vector<Observation> observations;
  std::optional<StepSummary> summary;  // of the environment's own rewards and flags
  std::vector<LeafRows> outputs;
  std::vector<State> states;
  std::optional<Standard> standard;
  std::optional<IsInit> is_init;
  LeafRows ids;
  std::optional<LeafRows> step_count, next_step_count;
  std::optional<LeafRows> steps_had;  // the caller's memory for the next step count at the root
  std::optional<LeafRows> version, mask;
  std::vector<LeafRows> elsewhere;  // leaves that other code writes, once per rollout
  std::vector<LeafRows*> all;       // every leaf of the layout, once
};

}  // namespace pycollect::inline PYCOLLECT_ABI
