// StepMoves: what is copied with each plain step, and to where.
//
// The arrays of a plain step are those of the leaves as they are, and most lie behind those of the
// step before. So a step is a list of copies, each to where the one before it ended; only where a
// run is full is its leaf asked for another one. A leaf without runs, whose frames are large, or of
// a few envs, is written by itself. What is written is what LeafRows::write() writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "pycollect/copy.h"
#include "pycollect/detail/leaf_rows.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class StepMoves {
 public:
  // Another array that comes with each step, which looks as that leaf's steps do. Returns its
  // number among all sources. Leaves must outlive this and stay where they are.
  std::size_t add_given(const LeafRows& form);
  // What is kept by the caller, at an address that stays.
  std::size_t add_kept(const void* address);
  // Steps that were recorded are written to that leaf from now on, from the source of that number.
  void add(LeafRows& leaf, std::size_t source) { now_.emplace_back(&leaf, source); }
  // The same for what the step after the recorded one begins with.
  void add_ahead(LeafRows& leaf, std::size_t source) { ahead_.emplace_back(&leaf, source); }

  // Whether a step's arrays, the given ones from `first` on, are those of the leaves as they are;
  // they are the sources then. There may be no more of them than were added.
  bool take(std::size_t first, std::span<const ConstTensorView> views) {
    const Form* form = forms_.data() + first;
    const std::byte** source = sources_.data() + first;
    for (const ConstTensorView& view : views) {
      if (!form++->fits(view)) {
        return false;
      }
      *source++ = view.data;
    }
    return true;
  }
  std::size_t given() const { return forms_.size(); }

  // Whether the step before that one was written here.
  bool is_at(std::int64_t step) const { return next_ == step; }
  // A step was written in another way, or the leaves were bound anew.
  void forget() { next_ = -1; }

  // Writes what take() took. With the last step nothing is written ahead.
  void write(std::int64_t step, bool is_last) {
    const std::byte* const* const sources = sources_.data();
    if (step != next_) {
      end_runs();
    }
    next_ = step + 1;
    for (Move& move : now_) {
      move.write(step, sources[move.source]);
    }
    if (!is_last) {
      for (Move& move : ahead_) {
        move.write(step + 1, sources[move.source]);
      }
    }
  }

 private:
  // What is_plain() of a leaf looks at, on one cache line; an array of two dimensions and more is
  // left to the leaf.
  struct Form {
    explicit Form(const LeafRows& rows);

    bool fits(const ConstTensorView& view) const {
      const bool alike =
          view.dtype == dtype && view.rank() == rank && view.device.kind == DeviceKind::cpu;
      if (alike && rank == 0) {
        return true;
      }
      if (alike && rank == 1 && view.shape[0] == extent && view.strides[0] == stride) {
        return true;
      }
      return leaf->is_plain(view);
    }

    DType dtype;
    int rank;
    std::int64_t extent = 0;
    std::int64_t stride = 0;
    const LeafRows* leaf;
  };

  struct Move {
    Move(LeafRows* rows, std::size_t number)
        : bytes(static_cast<std::size_t>(rows->step_bytes())), source(number), leaf(rows) {}

    void write(std::int64_t step, const std::byte* from) {
      if (to == end) {
        if (!leaf->has_runs()) {
          leaf->write_plain(step, from);
          return;
        }
        begin_run(step);
      }
      std::byte* const target = to;
      to += bytes;
      // A call for a few bytes would cost more than they do.
      if (bytes == 4) {
        std::memcpy(target, from, 4);
      } else if (bytes == 8) {
        std::memcpy(target, from, 8);
      } else if (bytes == 16) {
        std::memcpy(target, from, 16);
      } else {
        copy_frame(target, from, bytes);
      }
    }
    void begin_run(std::int64_t step);

    std::byte* to = nullptr;
    std::byte* end = nullptr;  // of the run
    std::size_t bytes;
    std::size_t source;
    LeafRows* leaf;
  };

  void end_runs();

  std::vector<Form> forms_;
  std::vector<const std::byte*> sources_;  // those of the forms first
  std::vector<Move> now_, ahead_;
  std::int64_t next_ = -1;  // the step at which the runs stand
};

}  // namespace pycollect::inline PYCOLLECT_ABI
