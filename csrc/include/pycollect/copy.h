// copy: the elements of one array into another one of equal shape, whatever strides and types.
//
// Between different types, values are cast:
// - to bool: is it different from zero (NaN is);
// - to a floating type: rounded once, to nearest, ties to even; too large becomes infinity;
// - from floating to integer: toward zero; what does not fit becomes the nearest value that does,
//   and NaN becomes 0;
// - from integer to integer: modulo 2^bits;
// - from complex to real: the real part; from real to complex: imaginary part 0.
//
// Elements need no alignment. The two arrays must not overlap, and the target's elements must be
// distinct; the source may repeat its own (strides of 0). All functions are thread-safe for
// distinct targets and throw std::invalid_argument where shapes differ or an array is not in host
// memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class ThreadPool;

// How bytes are written. Past the caches (non-temporal stores) spares the read of every line before
// it is written, and the lines that it would displace: half again to twice as fast as memcpy into
// memory that no cache holds, slower into memory that one does.
enum class Stores : std::uint8_t { cached, streamed };

// What suits memory of that many bytes that nobody reads soon: streamed where it is larger than
// half of the last cache.
Stores stores_for(std::int64_t bytes);

// Allocates nothing. What is streamed goes past the caches in pieces of 4 kB and more.
void copy(const TensorView& dst, const ConstTensorView& src, Stores stores = Stores::cached);

// The same; arrays of a megabyte and more are shared out between the threads of the pool.
void parallel_copy(ThreadPool& pool, const TensorView& dst, const ConstTensorView& src,
                   Stores stores = Stores::cached);

// Sets every element of an array to zero.
void zero(const TensorView& dst);

// The way every frame is written into a slab: one place for the choice of stores.
inline void copy_frame(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (bytes != 0) {  // an empty frame may have no address
    std::memcpy(dst, src, bytes);
  }
}

// The same past the caches. dst and bytes are multiples of 64: with lines written in part it is the
// slower way. Other threads see it after the writer's stream_fence(). Plain memcpy where the
// processor has no such stores.
void stream_frame(std::byte* dst, const std::byte* src, std::size_t bytes);
void stream_fence();

// Copies of n frames, for whatever n and wherever they start: strides and types are looked at
// once, so that a run of a few frames costs some 10 ns. Immutable.
class RunCopy {
 public:
  // dst and src stand for all runs: [any, *frame], each run along the first dimension. Their
  // addresses and first extents are not used.
  RunCopy(const TensorView& dst, const ConstTensorView& src, Stores stores = Stores::cached);

  // For arrays that are one frame each, of any rank: a run of one.
  static RunCopy whole(const TensorView& dst, const ConstTensorView& src,
                       Stores stores = Stores::cached);

  // Other threads see what it wrote as they see any other store.
  void operator()(std::byte* dst, const std::byte* src, std::int64_t n) const;

 private:
  using Kernel = void (*)(std::byte* dst, std::int64_t dst_step, const std::byte* src,
                          std::int64_t src_step, std::int64_t n, std::int64_t block);
  // One loop: how often, and how far both sides move each time, in bytes.
  struct Axis {
    std::int64_t extent;
    std::int64_t dst;
    std::int64_t src;
  };

  // The frame's dimensions are those from `first`, 0 or 1, on.
  RunCopy(const TensorView& dst, const ConstTensorView& src, int first, Stores stores);
  void sort_axes();
  void merge_axes();
  void absorb_block(bool same_type, std::int64_t item);
  void walk(int axis, std::int64_t extent, std::byte* dst, const std::byte* src) const;

  // Outermost first. The first one is the run, perhaps merged with a part of the frame: its extent
  // is what one frame contributes to it.
  std::array<Axis, Dims::kMaxRank + 1> axes_{};
  int rank_ = 0;
  bool empty_ = false;
  bool streams_ = false;
  std::int64_t block_ = 0;  // bytes that lie together on both sides
  Kernel kernel_ = nullptr;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
