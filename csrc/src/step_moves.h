// StepMoves: what is copied with each plain step, and to where.
//
// The arrays of a plain step are those of the leaves as they are, and most lie behind those of the
// step before. So a step is a list of copies, each to where the one before it ended; only where a
// run of steps is full is its leaf asked for another one. A leaf without runs, whose frames are
// large, or of a few envs, is written by itself. What is written is what LeafRows::write() writes.
#pragma once

#include <array>
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
  // Leaves must outlive this and stay where they are. Outputs and observations are given with each
  // step, in the order in which they were added.
  void add_output(LeafRows& leaf);
  // An array of that form: of the step itself and, ahead, of what the next one begins with. Either
  // leaf may be missing.
  void add_observation(const LeafRows& form, LeafRows* next, LeafRows* root);
  // What the caller keeps, at an address that stays.
  void add_kept(LeafRows& leaf, const void* address);

  // Whether the step before that one was written here.
  bool is_at(std::int64_t step) const { return next_ == step; }
  // A step was written in another way, or the leaves were bound anew.
  void forget() { next_ = -1; }

  // Whether the arrays are those of their leaves as they are.
  bool fit(std::span<const ConstTensorView> outputs,
           std::span<const ConstTensorView> observations) const;

  // Writes a step; with the last one nothing is written ahead. Returns false where an array is not
  // one of its leaf as it is: some of the step may be written then, and forget() is due. Arrays
  // that are `known` to fit are not looked at.
  template <bool known>
  bool write(std::int64_t step, bool is_last, std::span<const ConstTensorView> outputs,
             std::span<const ConstTensorView> observations) {
    if (!known &&
        (outputs.size() != outputs_.size() || observations.size() != observations_.size())) {
      return false;
    }
    if (step != next_ || step == full_at_) [[unlikely]] {
      // Where the step before was not written here, this one may well be of its kind.
      if (!known && step != next_ && !fit(outputs, observations)) {
        return false;
      }
      begin_runs(step, is_last);
    }
    const ConstTensorView* given = outputs.data();
    for (Output& own : outputs_) {
      if (!known && !own.form.fits(*given)) [[unlikely]] {
        return false;
      }
      own.run.write(step, given++->data);
    }
    given = observations.data();
    for (Observation& own : observations_) {
      if (!known && !own.form.fits(*given)) [[unlikely]] {
        return false;
      }
      const std::byte* const from = given++->data;
      if (own.next.leaf) {
        own.next.write(step, from);
      }
      if (own.root.leaf && !is_last) {
        own.root.write(step + 1, from);
      }
    }
    for (Kept& own : kept_) {
      own.run.write(step, own.address);
    }
    next_ = step + 1;
    return true;
  }

 private:
  // What is_plain() of a leaf looks at, side by side; an array of more dimensions is left to it.
  struct Form {
    static constexpr int kMostDims = 2;

    explicit Form(const LeafRows& rows);

    bool fits(const ConstTensorView& view) const {
      if (view.dtype == dtype && view.rank() == rank && view.device.kind == DeviceKind::cpu &&
          (rank < 1 || (view.shape[0] == extents[0] && view.strides[0] == strides[0])) &&
          (rank < 2 || (view.shape[1] == extents[1] && view.strides[1] == strides[1]))) [[likely]] {
        return true;
      }
      return fits_otherwise(view);
    }
    bool fits_otherwise(const ConstTensorView& view) const;

    DType dtype;
    int rank;  // -1: there are more dimensions
    std::array<std::int64_t, kMostDims> extents{}, strides{};
    const LeafRows* leaf;
  };

  // Where the next step of a leaf goes.
  struct Run {
    void begin(std::int64_t step);
    void write(std::int64_t step, const std::byte* from) {
      std::byte* const target = to;
      to += bytes;
      // A call for a few bytes would cost more than they do.
      if (bytes == 4) {
        std::memcpy(target, from, 4);
      } else if (bytes == 8) {
        std::memcpy(target, from, 8);
      } else if (bytes == 16) {
        std::memcpy(target, from, 16);
      } else if (bytes != 0) [[likely]] {
        copy_frame(target, from, bytes);
      } else {
        leaf->write_plain(step, from);
      }
    }

    LeafRows* leaf;  // null: there is none
    std::byte* to = nullptr;
    std::size_t bytes = 0;  // of a step; 0 where the leaf has no runs
    std::int64_t end = 0;   // the first step that is not of the run
  };

  struct Output {
    Form form;
    Run run;
  };
  struct Observation {
    Form form;
    Run next, root;
  };
  struct Kept {
    Run run;
    const std::byte* address;
  };

  // Those that are full, or all of them where the step before was not written here.
  void begin_runs(std::int64_t step, bool is_last);

  std::vector<Output> outputs_;
  std::vector<Observation> observations_;
  std::vector<Kept> kept_;
  std::int64_t next_ = -1;    // the step at which the runs stand
  std::int64_t full_at_ = 0;  // the step at which the first of them is full
};

}  // namespace pycollect::inline PYCOLLECT_ABI
