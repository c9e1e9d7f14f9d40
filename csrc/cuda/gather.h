// The gather kernel: the work of one thread, in C++ that is compiled for the device and, for tests,
// for the host. One launch moves the frames of all trajectories of all leaves.
//
// The work is divided into tiles, one per block. A tile is kTileBytes of one leaf's target, or
// kTileNumbers of its sums. The host stores the first and last run that a tile overlaps; if they
// differ, each thread finds its run by binary search. Targets are written in units of 16 bytes,
// whatever the size of a frame. If the frames of a run are contiguous, the run is one range of
// bytes; otherwise, each frame is one. A unit inside a single range is read by loads of 16 to 1
// bytes, depending on its alignment; loads of neighboring threads share cache lines. A unit that
// overlaps several ranges is moved piece by piece. Each thread reads all of its whole units before
// it writes the first.
//
// This file must compile for the host, so it uses neither shared memory nor barriers.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PYCOLLECT_DEVICE __device__ __forceinline__
#define PYCOLLECT_UNROLL _Pragma("unroll")
#define PYCOLLECT_NO_UNROLL _Pragma("unroll 1")
#else
#define PYCOLLECT_DEVICE inline
#define PYCOLLECT_UNROLL
#define PYCOLLECT_NO_UNROLL
#endif

namespace pycollect::gather {

inline constexpr std::uint32_t kThreads = 256;
inline constexpr std::uint32_t kUnitsPerThread = 4;
inline constexpr std::uint32_t kUnitBytes = 16;
inline constexpr std::uint32_t kTileBytes = kThreads * kUnitsPerThread * kUnitBytes;
inline constexpr std::uint32_t kTileNumbers = kThreads * kUnitsPerThread;

enum RunKind : std::int32_t {
  kFrames,       // copied, or summed
  kUncollected,  // copied; sums are zero
  kNothing,      // zeros
};

// Consecutive frames of the target, and their source. Runs are sorted by `target` and together
// cover the whole target.
struct Run {
  std::int64_t target;  // index of the first frame in the target
  std::int64_t row;     // source row; counts all batch dimensions except time as one
  std::int64_t start;   // step of the first frame in the source row
  std::int32_t step;    // 1: one step forward per frame; 0: all frames come from `start`
  std::int32_t kind;
};

enum LeafKind : std::int32_t { kCopy, kSumFloat32, kSumFloat64 };

// One leaf. The target is contiguous. Each frame of the source is contiguous, and frames are
// row_stride and time_stride apart.
struct Leaf {
  std::uint64_t source;
  std::uint64_t target;
  std::int64_t row_stride;  // strides are in bytes
  std::int64_t time_stride;
  std::int64_t frames;      // of the target
  std::uint32_t items;      // per frame: bytes, or numbers of a sum; below 2^31
  std::uint32_t per_items;  // 2^32 / items, rounded down; 2^32 - 1 if items is 1
  std::int32_t kind;
  std::int32_t unused;
};

// The work of one block: the tile of `leaf` that begins `before` items after the start of
// `first_frame`.
struct Tile {
  std::int64_t first_frame;
  std::int64_t first_item;  // index within the leaf
  std::uint32_t before;
  std::uint32_t leaf;
  std::uint32_t first_run;
  std::uint32_t last_run;
};

struct Parameters {
  const Leaf* leaves;
  const Run* runs;
  const Tile* tiles;
  std::int64_t run_count;
  std::int64_t steps;  // steps per row of the batch
  double gamma;        // discount factor of sums
};

struct alignas(16) Unit {
  std::uint64_t low;
  std::uint64_t high;
};

// Loads and stores of global device memory. These instructions need not determine the kind of
// memory.
#ifdef __CUDACC__
template <typename Number>
PYCOLLECT_DEVICE Number load(std::uint64_t address) {
  return __ldg(reinterpret_cast<const Number*>(address));
}
template <>
PYCOLLECT_DEVICE Unit load<Unit>(std::uint64_t address) {
  const ulonglong2 both = __ldg(reinterpret_cast<const ulonglong2*>(address));
  return {both.x, both.y};
}
template <typename Number>
PYCOLLECT_DEVICE void store(std::uint64_t address, Number value) {
  __stwb(reinterpret_cast<Number*>(address), value);
}
template <>
PYCOLLECT_DEVICE void store<Unit>(std::uint64_t address, Unit value) {
  __stwb(reinterpret_cast<ulonglong2*>(address), make_ulonglong2(value.low, value.high));
}
using Word = unsigned long long;  // the type that the device functions accept
PYCOLLECT_DEVICE std::uint32_t high_product(std::uint32_t a, std::uint32_t b) {
  return __umulhi(a, b);
}
#else
template <typename Number>
PYCOLLECT_DEVICE Number load(std::uint64_t address) {
  return *reinterpret_cast<const Number*>(address);
}
template <typename Number>
PYCOLLECT_DEVICE void store(std::uint64_t address, Number value) {
  *reinterpret_cast<Number*>(address) = value;
}
using Word = std::uint64_t;
PYCOLLECT_DEVICE std::uint32_t high_product(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(a) * b) >> 32U);
}
#endif

// The frame of an item within its leaf, and the position of the item within that frame.
struct Place {
  std::int64_t frame;
  std::uint32_t item;

  // Position of item `local` of the tile. Both summands are below 2^31, so their sum is below 2^32.
  PYCOLLECT_DEVICE Place(const Leaf& leaf, const Tile& tile, std::uint32_t local) {
    const std::uint32_t from_first = tile.before + local;
    // At most one too small, because the factor is rounded down.
    std::uint32_t frames = high_product(from_first, leaf.per_items);
    item = from_first - frames * leaf.items;
    if (item >= leaf.items) {
      ++frames;
      item -= leaf.items;
    }
    frame = tile.first_frame + frames;
  }
};

// Index of the run that contains a frame of the tile.
PYCOLLECT_DEVICE std::uint32_t run_of(const Parameters& p, const Tile& tile, std::int64_t frame) {
  std::uint32_t low = tile.first_run;
  std::uint32_t high = tile.last_run + 1;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (p.runs[middle].target <= frame) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Contiguous bytes of a target that come from contiguous bytes of the source.
struct Range {
  std::uint64_t source;  // 0: zeros
  std::int64_t bytes;

  PYCOLLECT_DEVICE Range(const Parameters& p, const Leaf& leaf, const Tile& tile, const Place& at) {
    const std::uint32_t index = run_of(p, tile, at.frame);
    const Run run = p.runs[index];
    const std::int64_t end = index + 1 < p.run_count ? p.runs[index + 1].target : leaf.frames;
    const std::int64_t step = run.step * leaf.time_stride;
    const bool is_one = run.kind == kNothing || step == leaf.items;
    bytes = (is_one ? end - at.frame : 1) * static_cast<std::int64_t>(leaf.items) - at.item;
    source = run.kind == kNothing
                 ? 0
                 : leaf.source + run.row * leaf.row_stride + run.start * leaf.time_stride +
                       (at.frame - run.target) * step + at.item;
  }
};

// Loads 16 bytes, the least significant first, in pieces of sizeof(Number).
template <typename Number>
PYCOLLECT_DEVICE Unit composed(std::uint64_t address) {
  constexpr std::uint32_t kSize = sizeof(Number);
  Unit unit{0, 0};
  PYCOLLECT_UNROLL
  for (std::uint32_t i = 0; i < 8 / kSize; ++i) {
    unit.low |= static_cast<std::uint64_t>(load<Number>(address + i * kSize)) << (8 * kSize * i);
    unit.high |= static_cast<std::uint64_t>(load<Number>(address + 8 + i * kSize))
                 << (8 * kSize * i);
  }
  return unit;
}

PYCOLLECT_DEVICE Unit unit_at(std::uint64_t address) {
  switch (address & 15U) {
    case 0:
      return load<Unit>(address);
    case 8:
      return composed<Word>(address);
    case 4:
    case 12:
      return composed<std::uint32_t>(address);
    default:
      return address % 2 == 0 ? composed<std::uint16_t>(address) : composed<std::uint8_t>(address);
  }
}

// Copies bytes, four at a time if the alignment allows it.
PYCOLLECT_DEVICE void move(std::uint64_t target, std::uint64_t source, std::uint32_t bytes) {
  const bool by_four = ((target | source | bytes) & 3U) == 0;
  const std::uint32_t size = by_four ? 4 : 1;
  PYCOLLECT_NO_UNROLL
  for (std::uint32_t i = 0; i < bytes; i += size) {
    if (by_four) {
      store<std::uint32_t>(target + i, source == 0 ? 0 : load<std::uint32_t>(source + i));
    } else {
      store<std::uint8_t>(target + i, source == 0 ? 0 : load<std::uint8_t>(source + i));
    }
  }
}

PYCOLLECT_DEVICE void copy(const Parameters& p, const Leaf& leaf, const Tile& tile,
                           std::uint32_t thread) {
  Unit values[kUnitsPerThread];
  std::uint32_t in_pieces = 0;  // a bit for each unit
  const std::uint64_t target = leaf.target + static_cast<std::uint64_t>(tile.first_item);
  const bool is_aligned = leaf.target % kUnitBytes == 0;
  PYCOLLECT_UNROLL
  for (std::uint32_t i = 0; i < kUnitsPerThread; ++i) {
    values[i] = Unit{0, 0};
    const Place at(leaf, tile, (i * kThreads + thread) * kUnitBytes);
    if (at.frame < leaf.frames) {
      const Range range(p, leaf, tile, at);
      if (!is_aligned || range.bytes < kUnitBytes) {
        in_pieces |= 1U << i;
      } else if (range.source != 0) {
        values[i] = unit_at(range.source);
      }
    }
  }
  PYCOLLECT_UNROLL
  for (std::uint32_t i = 0; i < kUnitsPerThread; ++i) {
    const std::uint32_t local = (i * kThreads + thread) * kUnitBytes;
    if ((in_pieces >> i & 1U) == 0 && Place(leaf, tile, local).frame < leaf.frames) {
      store<Unit>(target + local, values[i]);
    }
  }
  PYCOLLECT_NO_UNROLL
  for (std::uint32_t i = 0; i < kUnitsPerThread; ++i) {
    std::uint32_t local = (i * kThreads + thread) * kUnitBytes;
    const std::uint32_t end = (in_pieces >> i & 1U) == 0 ? local : local + kUnitBytes;
    PYCOLLECT_NO_UNROLL
    while (local < end) {
      const Place at(leaf, tile, local);
      if (at.frame >= leaf.frames) {
        break;
      }
      const Range range(p, leaf, tile, at);
      const std::uint32_t left = end - local;
      const std::uint32_t bytes =
          range.bytes < left ? static_cast<std::uint32_t>(range.bytes) : left;
      move(target + local, range.source, bytes);
      local += bytes;
    }
  }
}

// Computes the numbers of the target. Each is the sum of the numbers in its own cell and in the
// cells ahead, the k-th multiplied by gamma^k, in double precision and rounded once. Target and
// batch have the same cells.
template <typename Number>
PYCOLLECT_DEVICE void sum(const Parameters& p, const Leaf& leaf, const Tile& tile,
                          std::uint32_t thread) {
  PYCOLLECT_NO_UNROLL
  for (std::uint32_t i = 0; i < kUnitsPerThread; ++i) {
    const std::uint32_t local = i * kThreads + thread;
    const Place at(leaf, tile, local);
    if (at.frame >= leaf.frames) {
      return;
    }
    const Run run = p.runs[run_of(p, tile, at.frame)];
    double total = 0;
    if (run.kind == kFrames) {
      const std::uint64_t row = leaf.source + run.row * leaf.row_stride + at.item * sizeof(Number);
      const auto number_at = [&](std::int64_t t) -> double {
        return load<Number>(row + t * leaf.time_stride);
      };
      std::int64_t t = run.start + run.step * (at.frame - run.target);
      total = number_at(t);
      for (const std::int64_t first = at.frame - run.row * p.steps; t-- > first;) {
        total = number_at(t) + p.gamma * total;
      }
    }
    const auto number = static_cast<std::uint64_t>(tile.first_item + local);
    store<Number>(leaf.target + number * sizeof(Number), static_cast<Number>(total));
  }
}

// Does the work of one thread of one block.
PYCOLLECT_DEVICE void gather(const Parameters& p, std::int64_t block, std::uint32_t thread) {
  const Tile tile = p.tiles[block];
  const Leaf leaf = p.leaves[tile.leaf];
  switch (leaf.kind) {
    case kSumFloat32:
      return sum<float>(p, leaf, tile, thread);
    case kSumFloat64:
      return sum<double>(p, leaf, tile, thread);
    default:
      return copy(p, leaf, tile, thread);
  }
}

}  // namespace pycollect::gather
