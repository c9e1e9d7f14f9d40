// multistep: n-step returns of a batch, and the frames from which they are bootstrapped.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pycollect/split.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class ThreadPool;

// How far each frame of a batch looks ahead: n steps, or to the end of its trajectory's part in
// this row where that comes first. Frame t of a segment of L frames leads to frame
// min(t + n - 1, L - 1), both included. Immutable, so safe to share.
//
// R. S. Sutton, "Learning to predict by the methods of temporal differences", Machine Learning 3
// (1988). Uncollected cells lead to themselves, by no step, and no frame looks into one.
class MultiStepPlan {
 public:
  // Cells that follow each other in one row: a segment, or uncollected ones.
  struct Piece {
    Segment cells;
    bool collected;
  };

  // The segments of `split`, which is not needed any more afterwards. Throws std::invalid_argument
  // where n_steps is below 1.
  MultiStepPlan(const SplitPlan& split, std::int64_t n_steps);

  // The shape of the batch, time last.
  const Dims& batch() const { return batch_; }
  std::int64_t n_steps() const { return n_steps_; }
  // Together all cells, row after row.
  std::span<const Piece> pieces() const { return pieces_; }

  // Each source [*batch, *frame] into its target of the same shape: at each cell what lies in the
  // cell that it leads to. Values are cast to the target's type, as by copy(). Throws
  // std::invalid_argument, before anything is written, where a shape does not fit. Linear in the
  // targets' size, shared between the threads of the pool.
  void shift(ThreadPool& pool, std::span<const ConstTensorView> sources,
             std::span<const TensorView> targets) const;

  // The same with, at each cell, the sum of gamma^k times what lies k cells further, up to the one
  // that it leads to; zero in uncollected cells. Summed in double precision and rounded once.
  // Linear in the sources' size, whatever n: each sum consists of two running ones, of the rest of
  // its block of n frames and of the beginning of the next. Nothing is ever subtracted, so that a
  // huge or infinite value is in the sums that look at it and in no other.
  void sum(ThreadPool& pool, double gamma, std::span<const ConstTensorView> sources,
           std::span<const TensorView> targets) const;

  // By how many steps each cell looks ahead, its own included: int64 of the batch's shape, 1 to n,
  // 0 in uncollected cells.
  void steps(const TensorView& target) const;

  // gamma to the power of steps(), by which the value of the frame that a cell leads to counts; 1
  // in uncollected cells, which look no step ahead. Of the batch's shape and of any type.
  void discounts(double gamma, const TensorView& target) const;

  // Whether a cell is a frame with another one behind it in its segment: bool of the batch's shape.
  void nonterminal(const TensorView& target) const;

 private:
  class Shift;
  class Sum;

  void add(std::int64_t row, std::int64_t start, std::int64_t end, bool collected);
  // Calls visit(piece, begin, end) for the parts of pieces that are cells [begin, end) of the
  // batch, counted row after row; positions are given within the piece.
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
