// Layout: the leaves of a batch. Placement: their positions in a slab.
//
// A slab of geometry (workers B, envs P, steps T) starts with one rollout header per worker. The
// leaves follow in order, each contiguous and 64-byte aligned. Both types are immutable after
// construction and safe to share between threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pycollect/dtype.h"
#include "pycollect/key.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// One tensor of a frame: its key, its type, and its shape for one frame of one environment.
struct Leaf {
  Key key;
  DType dtype = DType::float32;
  Dims shape;

  std::int64_t frame_bytes() const;
  friend bool operator==(const Leaf&, const Leaf&) = default;
};

class Layout {
 public:
  // Throws std::invalid_argument if there is no leaf, if a key is empty, occurs twice, or lies
  // inside another key, or if a frame has more than Dims::kMaxRank - 3 dimensions. Throws
  // std::length_error if a stride does not fit in 64 bits.
  explicit Layout(std::vector<Leaf> leaves);

  std::span<const Leaf> leaves() const { return leaves_; }
  const Leaf& operator[](std::size_t i) const { return leaves_[i]; }
  std::size_t size() const { return leaves_.size(); }

  // The position of a key, or -1 if it is missing.
  int find(const Key& key) const;

  // A hash of the leaves and their order, the same on every machine (FNV-1a, 64 bits).
  std::uint64_t fingerprint() const { return fingerprint_; }

 private:
  std::vector<Leaf> leaves_;
  std::uint64_t fingerprint_;
};

// The optional leaves that a recorder writes in addition to observations and outputs.
struct StandardLeaves {
  bool policy_version = true;  // "collector.policy_version", int64
  bool step_count = false;     // "step_count" and "next.step_count", int64 [1]
  bool mask = false;           // "collector.mask", bool: False in uncollected cells
};

// Returns the layout that a Recorder writes for an environment with one reward and one set of
// flags:
// - each observation, and the same key below "next";
// - the outputs, including the actions;
// - "done", "terminated" and "truncated", bool [1], and the same below "next";
// - "next.reward", float32 [1];
// - "collector.traj_ids", int64;
// - the leaves that `standard` selects.
//
// Throws as Layout's constructor does.
Layout standard_layout(const std::vector<Leaf>& observations, const std::vector<Leaf>& outputs,
                       StandardLeaves standard = {});

// The order of a slab's batch dimensions in memory: `stack` is [B, P, T], for cat_results "stack"
// and 0; `time` is [P, B, T], which concatenates workers along time (-1).
enum class Order : std::uint8_t { stack, time };

struct Geometry {
  std::int64_t workers = 1;
  std::int64_t envs = 1;
  std::int64_t steps = 1;
  Order order = Order::stack;

  std::int64_t frames() const;
  friend bool operator==(const Geometry&, const Geometry&) = default;
};

class Placement {
 public:
  // Throws std::invalid_argument for extents below 1 and std::length_error if the size exceeds 64
  // bits.
  Placement(Layout layout, Geometry geometry);

  const Layout& layout() const { return layout_; }
  const Geometry& geometry() const { return geometry_; }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t offset(std::size_t leaf) const { return offsets_[leaf]; }

  // The offset of the rollout header of a row, and the size of each header. header_offset() and
  // rows() throw std::out_of_range for an unknown row.
  std::int64_t header_offset(std::int64_t row) const;
  std::int64_t header_bytes() const { return header_bytes_; }

  // The distances in bytes between the rows of two workers, and between two environments of one
  // worker.
  struct RowStrides {
    std::int64_t worker;
    std::int64_t env;
  };
  RowStrides row_strides(std::size_t leaf) const;

  // A leaf of the slab at `base` as [B, P, T, *frame], for either order in memory.
  TensorView view(std::byte* base, std::size_t leaf) const;
  // The rows of one worker in this leaf, [P, T, *frame].
  TensorView rows(std::byte* base, std::size_t leaf, std::int64_t row) const;

 private:
  Layout layout_;
  Geometry geometry_;
  std::vector<std::int64_t> offsets_;
  std::int64_t header_bytes_ = 0;
  std::int64_t bytes_ = 0;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
