// StepMoves: the copies of each plain step, with their targets.
//
// The arrays of a plain step match their leaves exactly, and most targets directly follow those of
// the previous step. So a step is a list of copies, each to the end of the previous one; a leaf is
// only asked for a new target when its run of steps is full. A leaf without runs (with large
// frames, or few environments) writes each step itself. The result is the same as that of
// LeafRows::write().
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
  // The leaves must outlive this object and must not move. Each step passes outputs and
  // observations in the order in which they were added.
  void add_output(LeafRows& leaf);
  // Adds an array of this form. It is written to `next` at the same step and to `root` one step
  // ahead. Either leaf may be null.
  void add_observation(const LeafRows& form, LeafRows* next, LeafRows* root);
  // Adds an array of the caller at a fixed address.
  void add_kept(LeafRows& leaf, const void* address);

  // Whether write() wrote the step before this one.
  bool is_at(std::int64_t step) const { return next_ == step; }
  // Call this after a step was written in another way, or after the leaves were bound again.
  void forget() { next_ = -1; }

  // Whether the arrays match their leaves exactly.
  bool fit(std::span<const ConstTensorView> outputs,
           std::span<const ConstTensorView> observations) const;

  // Writes a step. The last step writes nothing ahead. Returns false if an array does not match its
  // leaf exactly; a part of the step may then be written, and the caller must call forget().
  // `known`: the arrays are known to match and are not checked.
  template <bool known>
  bool write(std::int64_t step, bool is_last, std::span<const ConstTensorView> outputs,
             std::span<const ConstTensorView> observations) {
    if (!known &&
        (outputs.size() != outputs_.size() || observations.size() != observations_.size())) {
      return false;
    }
    if (step != next_ || step == full_at_) [[unlikely]] {
      // If the previous step was not written here, this one may not be plain either.
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
  // The members that LeafRows::is_plain() checks, side by side. For arrays of more dimensions,
  // is_plain() is called.
  struct Form {
    static constexpr int kMostDims = 2;

    explicit Form(const LeafRows& rows);

    bool fits(const ConstTensorView& view) const {
      if (view.dtype == dtype && view.rank() == rank && view.device.kind == DeviceKind::cpu &&
          (rank < 1 || (view.shape[0] == extents[0] && view.strides[0] == strides[0])) &&
          (rank < 2 || (view.shape[1] == extents[1] && view.strides[1] == strides[1]))) [[likely]] {
        return true;
      }
      return fits_by_leaf(view);
    }
    bool fits_by_leaf(const ConstTensorView& view) const;

    DType dtype;
    int rank;  // -1: more than kMostDims
    std::array<std::int64_t, kMostDims> extents{}, strides{};
    const LeafRows* leaf;
  };

  // The target of a leaf's next step.
  struct Run {
    void begin(std::int64_t step);
    void write(std::int64_t step, const std::byte* from) {
      std::byte* const target = to;
      to += bytes;
      // For a few bytes, a call costs more than the copy.
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

    LeafRows* leaf;  // null: no leaf
    std::byte* to = nullptr;
    std::size_t bytes = 0;  // per step; 0 if the leaf has no runs
    std::int64_t end = 0;   // the first step after the run
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

  // Begins new runs for full ones, or for all if the previous step was not written here.
  void begin_runs(std::int64_t step, bool is_last);

  std::vector<Output> outputs_;
  std::vector<Observation> observations_;
  std::vector<Kept> kept_;
  std::int64_t next_ = -1;    // the step that continues the runs
  std::int64_t full_at_ = 0;  // the first step at which a run is full
};

}  // namespace pycollect::inline PYCOLLECT_ABI
