#include "step_moves.h"

namespace pycollect::inline PYCOLLECT_ABI {

StepMoves::Form::Form(const LeafRows& rows)
    : dtype(rows.leaf().dtype), rank(rows.step_shape().size()), leaf(&rows) {
  if (rank == 1) {
    extent = rows.step_shape()[0];
    stride = static_cast<std::int64_t>(item_size(dtype));
  }
}

std::size_t StepMoves::add_given(const LeafRows& form) {
  forms_.emplace_back(form);
  sources_.push_back(nullptr);
  return forms_.size() - 1;
}

std::size_t StepMoves::add_kept(const void* address) {
  sources_.push_back(static_cast<const std::byte*>(address));
  return sources_.size() - 1;
}

void StepMoves::Move::begin_run(std::int64_t step) {
  const LeafRows::Run run = leaf->run_from(step);
  to = run.data;
  end = to + run.steps * leaf->step_bytes();
}

void StepMoves::end_runs() {
  for (std::vector<Move>* moves : {&now_, &ahead_}) {
    for (Move& move : *moves) {
      move.to = move.end = nullptr;
    }
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
