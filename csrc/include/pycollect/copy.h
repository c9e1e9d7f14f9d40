// Copying the elements of one array into another of equal shape, with any strides and types.
//
// Values of different types are cast:
// - to bool: whether the value differs from zero (NaN does);
// - to a floating type: rounded once, to nearest, ties to even; a value that is too large becomes
//   infinity;
// - from floating to integer: toward zero; a value out of range becomes the nearest one in range,
//   and NaN becomes 0;
// - from integer to integer: modulo 2^bits;
// - from complex to real: the real part; from real to complex: imaginary part 0.
//
// Elements need no alignment. The two arrays must not overlap, and the elements of the target must
// be distinct; the source may repeat elements (strides of 0). All functions are thread-safe for
// distinct targets. They throw std::invalid_argument if shapes differ or if an array is not in host
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

// How bytes are written. Streamed (non-temporal) stores bypass the caches. They save the read of
// each line before it is written, and they displace no other lines. They are 1.5 to 2 times as fast
// as memcpy into memory that is not in a cache, and slower into memory that is.
enum class Stores : std::uint8_t { cached, streamed };

// The faster kind of store for memory of this size that is not read soon: streamed if it is larger
// than half of the last-level cache.
Stores stores_for(std::int64_t bytes);

// Copies src to dst. Allocates nothing. Streamed stores are used for contiguous pieces of at least
// 4 kB.
void copy(const TensorView& dst, const ConstTensorView& src, Stores stores = Stores::cached);

// Like copy(), but the threads of the pool share the copy of an array of at least one megabyte.
void parallel_copy(ThreadPool& pool, const TensorView& dst, const ConstTensorView& src,
                   Stores stores = Stores::cached);

// Sets every element of an array to zero.
void zero(const TensorView& dst);

// Writes one frame into a slab. All frames are written by this function or stream_frame().
inline void copy_frame(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (bytes != 0) {  // an empty frame may have a null address
    std::memcpy(dst, src, bytes);
  }
}

// Like copy_frame(), but bypasses the caches. `dst` and `bytes` must be multiples of 64, because
// partly written lines make streaming slower than memcpy. The writing thread must call
// stream_fence() before another thread reads the frame. Uses memcpy on processors without such
// stores.
void stream_frame(std::byte* dst, const std::byte* src, std::size_t bytes);
void stream_fence();

// Copies runs of n frames, for any n and any position. Strides and types are examined once, in the
// constructor, so a run of a few frames costs some 10 ns. Immutable.
class RunCopy {
 public:
  // `dst` and `src` describe all runs: [any, *frame], with each run along the first dimension.
  // Their addresses and first extents are not used.
  RunCopy(const TensorView& dst, const ConstTensorView& src, Stores stores = Stores::cached);

  // For arrays that are one frame each, of any rank; use n = 1.
  static RunCopy whole(const TensorView& dst, const ConstTensorView& src,
                       Stores stores = Stores::cached);

  // Copies n frames. Other threads see the result like any other store; no stream_fence() is
  // needed.
  void operator()(std::byte* dst, const std::byte* src, std::int64_t n) const;

 private:
  using Kernel = void (*)(std::byte* dst, std::int64_t dst_step, const std::byte* src,
                          std::int64_t src_step, std::int64_t n, std::int64_t block);
  // One loop: its number of iterations, and the distance in bytes that each side moves per
  // iteration.
  struct Axis {
    std::int64_t extent;
    std::int64_t dst;
    std::int64_t src;
  };

  // The dimensions of a frame start at `first`, which is 0 or 1.
  RunCopy(const TensorView& dst, const ConstTensorView& src, int first, Stores stores);
  void sort_axes();
  void merge_axes();
  void absorb_block(bool same_type, std::int64_t item);
  void walk(int axis, std::int64_t extent, std::byte* dst, const std::byte* src) const;

  // Outermost axis first. The first axis is the run, possibly merged with a part of the frame; its
  // extent is then the contribution of one frame.
  std::array<Axis, Dims::kMaxRank + 1> axes_{};
  int rank_ = 0;
  bool empty_ = false;
  bool streams_ = false;
  std::int64_t block_ = 0;  // contiguous bytes on both sides
  Kernel kernel_ = nullptr;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
