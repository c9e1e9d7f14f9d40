// copy(), parallel_copy(), RunCopy and zero() for any shapes, strides and types.

#include <stdexcept>

#include "fuzz.h"
#include "pycollect/copy.h"
#include "pycollect/thread_pool.h"

using namespace pycollect;
using namespace pycollect::fuzz;

namespace {

std::int64_t most_elements(Bytes& in) {
  const int size = in.byte();  // copies of a megabyte use several threads
  return size == 255 ? 80000 : size > 240 ? 20000 : 500;
}

// Copies the first dimension in two runs.
void copy_in_runs(Bytes& in, const TensorView& dst, const TensorView& src, Stores stores) {
  const RunCopy run(dst, src, stores);
  const std::int64_t n = dst.shape[0], first = n == 0 ? 0 : in.byte() % n;
  run(dst.data, src.data, first);
  if (dst.count() > 0) {  // else the addresses are null
    run(dst.data + first * dst.strides[0], src.data + first * src.strides[0], n - first);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static ThreadPool pool(3);
  Bytes in(data, size);
  const DType to = in.dtype(), from = in.one_in(2) ? to : in.dtype();
  const Dims shape = in.shape(5, most_elements(in));
  const Stores stores = in.one_in(2) ? Stores::streamed : Stores::cached;
  const int way = in.below(5);
  Array target(in, to, shape, Strides::distinct);
  Array source(in, from, shape, Strides::any);
  const std::vector<std::byte> before = target.memory;

  if (way == 4) {  // another shape, or an array that is not in host memory
    TensorView other = source.view;
    in.one_in(2) ? other.shape.push_back(1) : void(other.device.kind = DeviceKind::cuda);
    EXPECT(throws<std::invalid_argument>([&] { copy(target.view, other, stores); }));
    EXPECT(throws<std::invalid_argument>([&] { parallel_copy(pool, target.view, other, stores); }));
    EXPECT(target.memory == before);
    return 0;
  }
  if (way == 0) {
    copy(target.view, source.view, stores);
  } else if (way == 1) {
    parallel_copy(pool, target.view, source.view, stores);
  } else if (way == 2) {
    zero(target.view);
  } else if (shape.empty()) {
    RunCopy::whole(target.view, source.view, stores)(target.view.data, source.view.data, 1);
  } else {
    copy_in_runs(in, target.view, source.view, stores);
  }
  check_target(target, before, from, [&](const Dims& index) {
    return std::optional<const std::byte*>(way == 2 ? nullptr : at(source.view, index));
  });
  return 0;
}
