// The gather kernel: what one thread does, in C++ that is compiled for the device and, for tests,
// for the host. One launch moves the frames of all trajectories of all leaves.
//
// Work is cut into tiles: kTile units of one leaf's target, a unit being the most bytes that one
// thread can move at once there (16 where addresses allow it). A block does a tile. It finds the
// runs that the tile meets by binary search, which all its threads do alike, so that the reads are
// shared; each thread then finds those of its units among these few. Neighbouring threads write
// neighbouring units, and each reads all of its units before it writes the first.
//
// Kept free of everything that the host cannot compile: no shared memory, no barriers.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PYCOLLECT_DEVICE __device__ __forceinline__
#define PYCOLLECT_UNROLL _Pragma("unroll")
#else
#define PYCOLLECT_DEVICE inline
#define PYCOLLECT_UNROLL
#endif

namespace pycollect::gather {

inline constexpr std::uint32_t kThreads = 256;
inline constexpr std::uint32_t kUnitsPerThread = 4;
inline constexpr std::uint32_t kTile = kThreads * kUnitsPerThread;

enum RunKind : std::int32_t {
  kFrames,       // copied, or summed up
  kUncollected,  // copied; sums are zero
  kNothing,      // zeros
};

// Frames of the target that follow each other, and where they come from. Runs are sorted by
// `target`, and together are all of it.
struct Run {
  std::int64_t target;  // the first, counted in the target's order
  std::int64_t row;     // of the batch from which they come, all dimensions but time counted as one
  std::int64_t start;   // the step of that row from which the first one comes
  std::int32_t step;    // 1: the others come from the steps after it; 0: from the same
  std::int32_t kind;
};

enum LeafKind : std::int32_t { kCopy, kSumFloat32, kSumFloat64 };

// One leaf. The target is dense; the source's frames are, and lie at (row, step) strides.
struct Leaf {
  std::uint64_t source;
  std::uint64_t target;
  std::int64_t row_stride;  // in bytes, as the next one
  std::int64_t time_stride;
  std::int64_t frames;      // of the target
  std::int64_t first_tile;  // leaf i has tiles [first_tile of i, first_tile of i + 1)
  std::uint32_t units;      // per frame
  std::uint32_t unit;       // bytes: 16, 8, 4, 2 or 1; of one number where they are summed
  std::int32_t kind;
  std::int32_t unused;
};

struct Parameters {
  const Leaf* leaves;
  const Run* runs;
  std::int64_t leaf_count;
  std::int64_t run_count;
  std::int64_t steps;  // of a row of the batch
  double gamma;        // of sums
};

struct alignas(16) Unit16 {
  std::uint64_t low;
  std::uint64_t high;
};

// The last of items [low, high) whose `key` is at most `value`; that of item `low` is.
template <typename Item>
PYCOLLECT_DEVICE std::int64_t last_at_most(const Item* items, std::int64_t Item::* key,
                                           std::int64_t low, std::int64_t high,
                                           std::int64_t value) {
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    if (items[middle].*key <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Where the units of one thread lie.
struct Tile {
  std::int64_t first_unit;
  std::int64_t first_frame;
  std::uint32_t before;    // units of the first frame that are not this tile's
  std::int64_t low, high;  // its runs

  PYCOLLECT_DEVICE Tile(const Parameters& p, const Leaf& leaf, std::int64_t tile)
      : first_unit((tile - leaf.first_tile) * kTile), first_frame(first_unit / leaf.units) {
    before = static_cast<std::uint32_t>(first_unit - first_frame * leaf.units);
    const std::int64_t last = first_frame + (before + kTile - 1) / leaf.units;
    low = last_at_most(p.runs, &Run::target, 0, p.run_count, first_frame);
    high = last_at_most(p.runs, &Run::target, low, p.run_count, last) + 1;
  }
};

template <typename Unit>
PYCOLLECT_DEVICE void copy(const Parameters& p, const Leaf& leaf, const Tile& tile,
                           std::uint32_t thread) {
  Unit values[kUnitsPerThread];
  PYCOLLECT_UNROLL
  for (std::uint32_t i = 0; i < kUnitsPerThread; ++i) {
    values[i] = Unit{};
    const std::uint32_t local = tile.before + i * kThreads + thread;
    const std::int64_t frame = tile.first_frame + local / leaf.units;
    if (frame < leaf.frames) {
      const Run run = p.runs[last_at_most(p.runs, &Run::target, tile.low, tile.high, frame)];
      if (run.kind != kNothing) {
        const std::int64_t offset =
            run.row * leaf.row_stride +
            (run.start + run.step * (frame - run.target)) * leaf.time_stride +
            static_cast<std::int64_t>(local % leaf.units) * static_cast<std::int64_t>(sizeof(Unit));
        values[i] = *reinterpret_cast<const Unit*>(leaf.source + offset);
      }
    }
  }
  auto* target = reinterpret_cast<Unit*>(leaf.target) + tile.first_unit;
  PYCOLLECT_UNROLL
  for (std::uint32_t i = 0; i < kUnitsPerThread; ++i) {
    const std::uint32_t local = i * kThreads + thread;
    if (tile.first_frame + (tile.before + local) / leaf.units < leaf.frames) {
      target[local] = values[i];
    }
  }
}

// Each number of the target: those of its cell and the ones that it looks ahead to, the k-th times
// gamma^k, in double precision and rounded once. Target and batch have the same cells.
template <typename Number>
PYCOLLECT_DEVICE void sum(const Parameters& p, const Leaf& leaf, const Tile& tile,
                          std::uint32_t thread) {
  auto* target = reinterpret_cast<Number*>(leaf.target) + tile.first_unit;
  for (std::uint32_t i = 0; i < kUnitsPerThread; ++i) {
    const std::uint32_t local = i * kThreads + thread;
    const std::int64_t frame = tile.first_frame + (tile.before + local) / leaf.units;
    if (frame >= leaf.frames) {
      return;
    }
    const Run run = p.runs[last_at_most(p.runs, &Run::target, tile.low, tile.high, frame)];
    double total = 0;
    if (run.kind == kFrames) {
      const std::uint64_t row =
          leaf.source + run.row * leaf.row_stride +
          (tile.before + local) % leaf.units * static_cast<std::uint64_t>(sizeof(Number));
      const auto at = [&](std::int64_t t) -> double {
        return *reinterpret_cast<const Number*>(row + t * leaf.time_stride);
      };
      std::int64_t t = run.start + run.step * (frame - run.target);
      total = at(t);
      for (const std::int64_t first = frame - run.row * p.steps; t-- > first;) {
        total = at(t) + p.gamma * total;
      }
    }
    target[local] = static_cast<Number>(total);
  }
}

// What thread `thread` of block `block` does.
PYCOLLECT_DEVICE void gather(const Parameters& p, std::int64_t block, std::uint32_t thread) {
  const Leaf leaf = p.leaves[last_at_most(p.leaves, &Leaf::first_tile, 0, p.leaf_count, block)];
  const Tile tile(p, leaf, block);
  switch (leaf.kind) {
    case kSumFloat32:
      return sum<float>(p, leaf, tile, thread);
    case kSumFloat64:
      return sum<double>(p, leaf, tile, thread);
    default:
      break;
  }
  switch (leaf.unit) {
    case 16:
      return copy<Unit16>(p, leaf, tile, thread);
    case 8:
      return copy<std::uint64_t>(p, leaf, tile, thread);
    case 4:
      return copy<std::uint32_t>(p, leaf, tile, thread);
    case 2:
      return copy<std::uint16_t>(p, leaf, tile, thread);
    default:
      return copy<std::uint8_t>(p, leaf, tile, thread);
  }
}

}  // namespace pycollect::gather
