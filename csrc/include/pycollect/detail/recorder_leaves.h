// RecorderLeaves: every leaf of a recorder's layout, by what is written into it and when.
//
// What the recorder is told of an environment and its policy is checked against the layout here, at
// construction; then the leaves are bound to one worker's rows of slab after slab.
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

// Not to be copied or moved: `all` points into it.
struct RecorderLeaves {
  struct Observation {
    std::optional<LeafRows> root;
    std::optional<LeafRows> next;
    std::optional<LeafRows> current;
    ConstTensorView view;  // of current
    bool live;

    // The leaf that tells what has to come; none where nothing is recorded of it.
    const std::optional<LeafRows>& written() const { return next ? next : current; }

    // What was checked, where the next action is chosen on it; it may lie there already.
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
    ConstTensorView view;     // of current
    ConstTensorView initial;  // of the shape of current
    Fit initial_fit;

    const LeafRows& written() const { return next ? *next : current; }
  };
  struct Standard {  // reward and flags of an environment that has one of each
    LeafRows reward, done, terminated, truncated;
    std::vector<LeafRows> root_flags;
  };
  struct IsInit {
    LeafRows root;
    LeafRows current;
    ConstTensorView view;
  };

  // As Recorder's constructor, which says what it throws.
  RecorderLeaves(const Layout& layout, const std::vector<ObservationSpec>& observation_specs,
                 const std::vector<Key>& output_keys, const RecorderOptions& options,
                 const std::vector<StateSpec>& state_specs,
                 const std::optional<TensorView>& is_init_memory,
                 const std::optional<TensorView>& step_count_memory,
                 const std::vector<Key>& elsewhere_keys);
  RecorderLeaves(const RecorderLeaves&) = delete;
  RecorderLeaves& operator=(const RecorderLeaves&) = delete;

  // What is written from now on lies in this row of the slab, from that environment on.
  void bind(Slab& slab, std::int64_t row, std::int64_t first_env);
  // What was written since is all there.
  void flush();

  std::vector<Observation> observations;
  std::optional<StepSummary> summary;  // of an environment's own rewards and flags
  std::vector<LeafRows> outputs;
  std::vector<State> states;
  std::optional<Standard> standard;
  std::optional<IsInit> is_init;
  LeafRows ids;
  std::optional<LeafRows> step_count, next_step_count;
  std::optional<LeafRows> steps_had;  // the caller's memory that is the next root step count
  std::optional<LeafRows> version, mask;
  std::vector<LeafRows> elsewhere;  // what others write, once for each rollout
  std::vector<LeafRows*> all;       // every leaf of the layout, each once
};

}  // namespace pycollect::inline PYCOLLECT_ABI
