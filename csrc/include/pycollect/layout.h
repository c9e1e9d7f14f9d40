// Layout: what a batch consists of. Placement: where a Layout's leaves lie in one slab.
//
// A slab of geometry (workers B, envs P, steps T) starts with one rollout header per worker; then
// come the leaves in their order, each contiguous and 64-byte aligned. Both types are immutable
// after construction and safe to share between threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pycollect/dtype.h"
#include "pycollect/key.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// One tensor of a frame: its key path, type, and the shape it has for one frame of one env.
struct Leaf {
  Key key;
  DType dtype = DType::float32;
  Dims shape;

  std::int64_t frame_bytes() const;
  friend bool operator==(const Leaf&, const Leaf&) = default;
};

class Layout {
 public:
  // Throws std::invalid_argument for no leaf, an empty key, a key twice, or a key inside another.
  explicit Layout(std::vector<Leaf> leaves);

  std::span<const Leaf> leaves() const { return leaves_; }
  const Leaf& operator[](std::size_t i) const { return leaves_[i]; }
  std::size_t size() const { return leaves_.size(); }

  // The position of a key, or -1.
  int find(const Key& key) const;

  // Equal for equal leaves in equal order, on every machine (FNV-1a, 64 bits).
  std::uint64_t fingerprint() const { return fingerprint_; }

 private:
  std::vector<Leaf> leaves_;
  std::uint64_t fingerprint_;
};

// What a recorder writes besides observations and outputs, where the layout has it.
struct StandardLeaves {
  bool policy_version = true;  // "collector.policy_version", int64
  bool step_count = false;     // "step_count" and "next.step_count", int64 [1]
  bool mask = false;           // "collector.mask", bool: False in uncollected cells
};

// The layout of what a Recorder writes of an environment with a reward and flags: each observation
// and "next" of it; the outputs, actions among them; "done", "terminated" and "truncated", bool
// [1], and "next" of them; "next.reward", float32 [1]; "collector.traj_ids", int64. Throws as
// Layout does.
Layout standard_layout(const std::vector<Leaf>& observations, const std::vector<Leaf>& outputs,
                       StandardLeaves standard = {});

// How the batch dimensions of a slab follow each other in memory: [B, P, T] ("stack", and 0, which
// only joins the first two), or [P, B, T], in which workers follow each other along time (-1).
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
  // Throws std::invalid_argument for extents below 1 and std::length_error past 64 bits.
  Placement(Layout layout, Geometry geometry);

  const Layout& layout() const { return layout_; }
  const Geometry& geometry() const { return geometry_; }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t offset(std::size_t leaf) const { return offsets_[leaf]; }

  // Where worker's rollout header starts, and how long each one is.
  std::int64_t header_offset(std::int64_t worker) const;
  std::int64_t header_bytes() const { return header_bytes_; }

  // How far apart the rows of two workers lie, and those of two envs of one, in bytes.
  struct RowStrides {
    std::int64_t worker;
    std::int64_t env;
  };
  RowStrides row_strides(std::size_t leaf) const;

  // A leaf of a slab that starts at base, as [B, P, T, *frame], whatever the order in memory.
  TensorView view(std::byte* base, std::size_t leaf) const;
  // One worker's rows of it, [P, T, *frame].
  TensorView rows(std::byte* base, std::size_t leaf, std::int64_t worker) const;

 private:
  Layout layout_;
  Geometry geometry_;
  std::vector<std::int64_t> offsets_;
  std::int64_t header_bytes_ = 0;
  std::int64_t bytes_ = 0;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
