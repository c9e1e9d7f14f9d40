#include "step_moves.h"

#include <algorithm>
#include <limits>

namespace pycollect::inline PYCOLLECT_ABI {

StepMoves::Form::Form(const LeafRows& rows)
    : dtype(rows.leaf().dtype), rank(rows.step_shape().size()), leaf(&rows) {
  if (rank > kMostDims) {
    rank = -1;
    return;
  }
  auto stride = static_cast<std::int64_t>(item_size(dtype));
  for (int i = rank - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    extents[at] = rows.step_shape()[i];
    strides[at] = stride;
    stride *= extents[at];
  }
}

bool StepMoves::Form::fits_by_leaf(const ConstTensorView& view) const {
  return leaf->is_plain(view);
}

void StepMoves::add_output(LeafRows& leaf) { outputs_.push_back({Form(leaf), {&leaf}}); }

void StepMoves::add_observation(const LeafRows& form, LeafRows* next, LeafRows* root) {
  observations_.push_back({Form(form), {next}, {root}});
}

void StepMoves::add_kept(LeafRows& leaf, const void* address) {
  kept_.push_back({{&leaf}, static_cast<const std::byte*>(address)});
}

void StepMoves::Run::begin(std::int64_t step) {
  if (!leaf->has_runs()) {
    bytes = 0;
    end = std::numeric_limits<std::int64_t>::max();
    return;
  }
  const LeafRows::Run run = leaf->run_from(step);
  to = run.data;
  bytes = static_cast<std::size_t>(leaf->step_bytes());
  end = step + run.steps;
}

bool StepMoves::fit(std::span<const ConstTensorView> outputs,
                    std::span<const ConstTensorView> observations) const {
  const auto fits = [](const auto& own, const ConstTensorView& given) {
    return own.form.fits(given);
  };
  return std::equal(outputs_.begin(), outputs_.end(), outputs.begin(), outputs.end(), fits) &&
         std::equal(observations_.begin(), observations_.end(), observations.begin(),
                    observations.end(), fits);
}

void StepMoves::begin_runs(std::int64_t step, bool is_last) {
  const bool restart = step != next_;
  full_at_ = std::numeric_limits<std::int64_t>::max();
  const auto begin = [&](Run& run, std::int64_t ahead) {
    if (restart || run.end == step + ahead) {
      run.begin(step + ahead);
    }
    full_at_ = std::min(full_at_, run.end - ahead);
  };
  for (Output& own : outputs_) {
    begin(own.run, 0);
  }
  for (Observation& own : observations_) {
    if (own.next.leaf) {
      begin(own.next, 0);
    }
    if (own.root.leaf && !is_last) {
      begin(own.root, 1);
    }
  }
  for (Kept& own : kept_) {
    begin(own.run, 0);
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
