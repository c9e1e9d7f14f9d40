// n-step returns of a batch, and the frames from which they are bootstrapped.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pycollect/split.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class ThreadPool;

// The number of steps that each frame of a batch looks ahead: n, or fewer if its segment ends
// earlier. Frame t of a segment of L frames leads to frame min(t + n - 1, L - 1), both included. A
// segment is the part of a trajectory in one row. Uncollected cells lead to themselves by zero
// steps, and no frame looks into one. Immutable, so safe to share.
//
// R. S. Sutton, "Learning to predict by the methods of temporal differences", Machine Learning 3
// (1988).
class MultiStepPlan {
 public:
  // Consecutive cells of one row: a segment, or uncollected cells.
  struct Piece {
    Segment cells;
    bool collected;
  };

  // Uses the segments of `split`, which may be destroyed afterwards. Throws std::invalid_argument
  // if n_steps is below 1.
  MultiStepPlan(const SplitPlan& split, std::int64_t n_steps);

  // The shape of the batch, time last.
  const Dims& batch() const { return batch_; }
  std::int64_t n_steps() const { return n_steps_; }
  // Pieces that cover all cells, row after row.
  std::span<const Piece> pieces() const { return pieces_; }

  // For each cell of a source [*batch, *frame], writes the frame that the cell leads to into the
  // target, which has the same shape. Values are cast to the target's type, as by copy(). The cost
  // is linear in the size of the targets; the threads of the pool share the work. Throws
  // std::invalid_argument, before anything is written, if a shape does not fit.
  void shift(ThreadPool& pool, std::span<const ConstTensorView> sources,
             std::span<const TensorView> targets) const;

  // Like shift(), but writes the sum of gamma^k times the frame k cells ahead, up to the frame that
  // the cell leads to. Uncollected cells get zero. Sums are computed in double precision and
  // rounded once.
  //
  // The cost is linear in the size of the sources, for any n: each sum combines two running sums,
  // over the rest of its block of n frames and over the start of the next block. Nothing is
  // subtracted, so a huge or infinite value affects only the sums that include it.
  void sum(ThreadPool& pool, double gamma, std::span<const ConstTensorView> sources,
           std::span<const TensorView> targets) const;

  // Writes the number of steps that each cell looks ahead, including its own: 1 to n, or 0 for
  // uncollected cells. The target is int64 of the batch's shape.
  void steps(const TensorView& target) const;

  // Writes gamma to the power of steps(), the discount of the value at the frame that a cell leads
  // to. Uncollected cells get 1. The target has the batch's shape and any type.
  void discounts(double gamma, const TensorView& target) const;

  // Writes whether the cell is a frame with another frame after it in its segment. The target is
  // bool of the batch's shape.
  void nonterminal(const TensorView& target) const;

 private:
  class Shift;
  class Sum;

  void add(std::int64_t row, std::int64_t start, std::int64_t end, bool collected);
  // Calls visit(piece, begin, end) for the parts of pieces in cells [begin, end) of the batch,
  // counted row after row; `begin` and `end` of the visit are relative to the piece.
  template <typename Visit>
  void walk(std::int64_t begin, std::int64_t end, const Visit& visit) const;
  template <typename Value, typename Function>
  void fill(const TensorView& target, DType dtype, const Function& value) const;
  void expect_shape(const TensorView& target, DType dtype) const;
  std::int64_t cells() const;

  Dims batch_;
  std::int64_t n_steps_;
  std::int64_t longest_;
  std::vector<Piece> pieces_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
