#include "pycollect/copy.h"

#include <unistd.h>

#include <algorithm>
#include <complex>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cast.h"
#include "pycollect/thread_pool.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

using RunKernel = void (*)(std::byte*, std::int64_t, const std::byte*, std::int64_t, std::int64_t,
                           std::int64_t);

// Below this size, one thread copies alone: a copy of 1 MB takes about 100 us.
constexpr std::int64_t kParallelBytes = std::int64_t{1} << 20;
constexpr std::int64_t kGrainBytes = std::int64_t{256} << 10;

// In the order of DType.
using Types = std::tuple<cast::Bool, std::uint8_t, std::int8_t, std::int16_t, std::int32_t,
                         std::int64_t, std::uint16_t, std::uint32_t, std::uint64_t, cast::Half,
                         cast::BFloat, float, double, std::complex<float>, std::complex<double>>;
constexpr std::size_t kTypes = std::tuple_size_v<Types>;

// Elements may be unaligned, hence memcpy; compilers turn it into a plain load or store.
template <typename T>
T load(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

template <typename D, typename S>
void cast_one(std::byte* dst, const std::byte* src) {
  const D value = cast::convert<D>(load<S>(src));
  std::memcpy(dst, &value, sizeof(D));
}

template <typename D, typename S>
void cast_run(std::byte* dst, std::int64_t dst_step, const std::byte* src, std::int64_t src_step,
              std::int64_t n, std::int64_t) {
  if (dst_step == sizeof(D) && src_step == sizeof(S)) {  // vectorized: the steps are constants
    for (std::int64_t i = 0; i < n; ++i) {
      cast_one<D, S>(dst + i * static_cast<std::int64_t>(sizeof(D)),
                     src + i * static_cast<std::int64_t>(sizeof(S)));
    }
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    cast_one<D, S>(dst + i * dst_step, src + i * src_step);
  }
}

template <std::size_t... Pairs>
constexpr auto make_cast_table(std::index_sequence<Pairs...>) {
  return std::array<RunKernel, kTypes * kTypes>{
      &cast_run<std::tuple_element_t<Pairs / kTypes, Types>,
                std::tuple_element_t<Pairs % kTypes, Types>>...};
}

RunKernel cast_kernel(DType dst, DType src) {
  static constexpr auto table = make_cast_table(std::make_index_sequence<kTypes * kTypes>{});
  return table[static_cast<std::size_t>(dst) * kTypes + static_cast<std::size_t>(src)];
}

// Smaller pieces gain nothing from non-temporal stores.
constexpr std::size_t kStreamBytes = 4096;

// Copies bytes that are contiguous on both sides. Streamed stores write whole cache lines; the
// incomplete lines at both ends are written through the caches.
template <Stores stores>
void copy_bytes(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (stores == Stores::cached || bytes < kStreamBytes) {
    copy_frame(dst, src, bytes);
    return;
  }
  const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(dst) % 64) % 64;
  const std::size_t body = (bytes - head) / 64 * 64;
  copy_frame(dst, src, head);
  stream_frame(dst + head, src + head, body);
  copy_frame(dst + head + body, src + head + body, bytes - head - body);
}

// For small frames, blocks of a size known at compile time: they need no call of memcpy.
template <std::size_t Bytes, Stores stores>
void copy_small_blocks(std::byte* dst, std::int64_t dst_step, const std::byte* src,
                       std::int64_t src_step, std::int64_t n, std::int64_t) {
  constexpr auto bytes = static_cast<std::int64_t>(Bytes);
  if (dst_step == bytes && src_step == bytes) {
    copy_bytes<stores>(dst, src, static_cast<std::size_t>(n * bytes));
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    std::memcpy(dst + i * dst_step, src + i * src_step, Bytes);
  }
}

template <Stores stores>
void copy_blocks(std::byte* dst, std::int64_t dst_step, const std::byte* src, std::int64_t src_step,
                 std::int64_t n, std::int64_t block) {
  if (dst_step == block && src_step == block) {
    copy_bytes<stores>(dst, src, static_cast<std::size_t>(n * block));
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    copy_bytes<stores>(dst + i * dst_step, src + i * src_step, static_cast<std::size_t>(block));
  }
}

template <Stores stores>
RunKernel block_kernel(std::int64_t block) {
  switch (block) {
    case 1:
      return &copy_small_blocks<1, stores>;
    case 2:
      return &copy_small_blocks<2, stores>;
    case 4:
      return &copy_small_blocks<4, stores>;
    case 8:
      return &copy_small_blocks<8, stores>;
    case 12:
      return &copy_small_blocks<12, stores>;
    case 16:
      return &copy_small_blocks<16, stores>;
    default:
      return &copy_blocks<stores>;
  }
}

void check(const TensorView& dst, const ConstTensorView& src) {
  if (!(dst.shape == src.shape)) {
    throw std::invalid_argument("copy: expected a source of shape " + to_string(dst.shape) +
                                ", the target's shape, got " + to_string(src.shape));
  }
  if (dst.device.kind != DeviceKind::cpu || src.device.kind != DeviceKind::cpu) {
    throw std::invalid_argument("copy: expected arrays in host memory, got one on a device");
  }
}

// The dimension along which threads divide a copy: the outermost one in the target's memory that is
// long enough, otherwise the longest.
int widest(const TensorView& dst, std::int64_t wanted) {
  int best = 0;
  for (int i = 1; i < dst.rank(); ++i) {
    const bool enough = dst.shape[i] >= wanted;
    const bool best_enough = dst.shape[best] >= wanted;
    const bool outer = std::abs(dst.strides[i]) > std::abs(dst.strides[best]);
    if (enough && best_enough ? outer : dst.shape[i] > dst.shape[best]) {
      best = i;
    }
  }
  return best;
}

template <typename View>
View moved_to_front(const View& view, int axis) {
  View moved{view.data, view.dtype, Dims{view.shape[axis]}, Dims{view.strides[axis]}, view.device};
  for (int i = 0; i < view.rank(); ++i) {
    if (i != axis) {
      moved.shape.push_back(view.shape[i]);
      moved.strides.push_back(view.strides[i]);
    }
  }
  return moved;
}

}  // namespace

#ifdef __SSE2__
void stream_frame(std::byte* dst, const std::byte* src, std::size_t bytes) {
  auto* to = reinterpret_cast<__m128i*>(dst);
  const auto* from = reinterpret_cast<const __m128i*>(src);
  for (std::size_t line = 0; line < bytes / 64; ++line, to += 4, from += 4) {
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
}

void stream_fence() { _mm_sfence(); }
#else
void stream_frame(std::byte* dst, const std::byte* src, std::size_t bytes) {
  copy_frame(dst, src, bytes);
}

void stream_fence() {}
#endif

// Capped at 16 MB because a virtual machine may report the caches of its whole host.
Stores stores_for(std::int64_t bytes) {
  constexpr std::int64_t kMost = std::int64_t{16} << 20;
#ifdef _SC_LEVEL3_CACHE_SIZE
  static const std::int64_t half = sysconf(_SC_LEVEL3_CACHE_SIZE) / 2;
  const std::int64_t from = half > 0 ? std::min(half, kMost) : kMost;
#else
  const std::int64_t from = kMost;
#endif
  return bytes > from ? Stores::streamed : Stores::cached;
}

RunCopy::RunCopy(const TensorView& dst, const ConstTensorView& src, Stores stores)
    : RunCopy(dst, src, 1, stores) {}

RunCopy RunCopy::whole(const TensorView& dst, const ConstTensorView& src, Stores stores) {
  return {dst, src, 0, stores};
}

RunCopy::RunCopy(const TensorView& dst, const ConstTensorView& src, int first, Stores stores) {
  if (dst.rank() < first || dst.rank() != src.rank() ||
      !(Dims(dst.shape.from(first)) == Dims(src.shape.from(first)))) {
    throw std::invalid_argument("copy: expected runs of frames of one shape, got " +
                                to_string(dst.shape) + " and " + to_string(src.shape));
  }
  axes_[0] = first == 1 ? Axis{1, dst.strides[0], src.strides[0]} : Axis{1, 0, 0};
  rank_ = 1;
  for (int i = first; i < dst.rank(); ++i) {
    empty_ = empty_ || dst.shape[i] == 0;
    if (dst.shape[i] != 1) {
      axes_[static_cast<std::size_t>(rank_++)] = {dst.shape[i], dst.strides[i], src.strides[i]};
    }
  }
  sort_axes();
  merge_axes();
  absorb_block(dst.dtype == src.dtype, static_cast<std::int64_t>(item_size(dst.dtype)));
  streams_ = stores == Stores::streamed && dst.dtype == src.dtype;
  kernel_ = dst.dtype != src.dtype ? cast_kernel(dst.dtype, src.dtype)
            : streams_             ? block_kernel<Stores::streamed>(block_)
                                   : block_kernel<Stores::cached>(block_);
}

// Sorts the axes by their stride in the target; axes of equal stride keep their order. Uses
// insertion because there are few axes and std::stable_sort allocates.
void RunCopy::sort_axes() {
  for (int i = 2; i < rank_; ++i) {
    const auto at = axes_.begin() + i;
    const auto place = std::upper_bound(
        axes_.begin() + 1, at, *at,
        [](const Axis& a, const Axis& b) { return std::abs(a.dst) > std::abs(b.dst); });
    std::rotate(place, at, at + 1);
  }
}

// Merges two loops into one if they are contiguous on both sides.
void RunCopy::merge_axes() {
  for (int i = rank_ - 1; i > 0; --i) {
    Axis& outer = axes_[static_cast<std::size_t>(i - 1)];
    const Axis inner = axes_[static_cast<std::size_t>(i)];
    if (outer.dst == inner.dst * inner.extent && outer.src == inner.src * inner.extent) {
      outer = {outer.extent * inner.extent, inner.dst, inner.src};
      std::move(axes_.begin() + i + 1, axes_.begin() + rank_, axes_.begin() + i);
      --rank_;
    }
  }
}

// Copies elements of a frame that are contiguous on both sides as one block.
void RunCopy::absorb_block(bool same_type, std::int64_t item) {
  block_ = item;
  const Axis& last = axes_[static_cast<std::size_t>(rank_ - 1)];
  if (same_type && rank_ > 1 && last.dst == item && last.src == item) {
    block_ *= last.extent;
    --rank_;
  }
}

void RunCopy::operator()(std::byte* dst, const std::byte* src, std::int64_t n) const {
  if (n > 0 && !empty_) {
    walk(0, n * axes_[0].extent, dst, src);
    if (streams_) {
      stream_fence();
    }
  }
}

void RunCopy::walk(int axis, std::int64_t extent, std::byte* dst, const std::byte* src) const {
  const Axis& at = axes_[static_cast<std::size_t>(axis)];
  if (axis == rank_ - 1) {
    kernel_(dst, at.dst, src, at.src, extent, block_);
    return;
  }
  const std::int64_t inner = axes_[static_cast<std::size_t>(axis) + 1].extent;
  for (std::int64_t i = 0; i < extent; ++i) {
    walk(axis + 1, inner, dst + i * at.dst, src + i * at.src);
  }
}

void copy(const TensorView& dst, const ConstTensorView& src, Stores stores) {
  check(dst, src);
  RunCopy::whole(dst, src, stores)(dst.data, src.data, 1);
}

void parallel_copy(ThreadPool& pool, const TensorView& dst, const ConstTensorView& src,
                   Stores stores) {
  const std::int64_t bytes = std::max(dst.bytes(), src.bytes());
  if (bytes < kParallelBytes || pool.threads() == 1) {
    copy(dst, src, stores);
    return;
  }
  check(dst, src);
  const int axis = widest(dst, std::int64_t{4} * pool.threads());
  const TensorView to = moved_to_front(dst, axis);
  const ConstTensorView from = moved_to_front(src, axis);
  const RunCopy run(to, from, stores);
  const std::int64_t n = to.shape[0];
  pool.parallel_for(n, std::max<std::int64_t>(1, kGrainBytes / (bytes / n)),
                    [&](std::int64_t begin, std::int64_t end) {
                      run(to.data + begin * to.strides[0], from.data + begin * from.strides[0],
                          end - begin);
                    });
}

void zero(const TensorView& dst) {
  if (dst.is_contiguous()) {
    if (const std::int64_t bytes = dst.bytes(); bytes > 0) {
      std::memset(dst.data, 0, static_cast<std::size_t>(bytes));
    }
    return;
  }
  std::array<std::byte, 16> zeros{};
  TensorView src = TensorView::contiguous(zeros.data(), dst.dtype, dst.shape);
  for (int i = 0; i < src.rank(); ++i) {
    src.strides[i] = 0;
  }
  copy(dst, src);
}

}  // namespace pycollect::inline PYCOLLECT_ABI
