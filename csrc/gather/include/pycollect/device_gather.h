// DeviceGather: splitting and n-step returns for batches in device memory, in one launch for all
// leaves.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "pycollect/cuda.h"
#include "pycollect/multistep.h"
#include "pycollect/split.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::cuda {

// Device memory for one gather, from the caller's allocator. It must stay allocated until the
// stream has finished the gather.
struct Workspace {
  DevicePointer address = 0;  // a multiple of 64
  std::int64_t bytes = 0;
};

class Staging;

// Does on a device what SplitPlan::padded() and flat() and MultiStepPlan::shift() and sum() do on
// the host. Plans are still made on the host, from the flags and ids there. Each call sends a table
// of some 64 bytes per trajectory and per 16 KiB of a target. The table is sent from pinned memory,
// so the host does not wait for the device.
//
// Sources and targets are views of device memory, shaped as for the functions of the host, with
// these differences. Types are not cast. Targets must be contiguous. The frames of a source must be
// contiguous, and its rows must lie at equal distances. Sums must be float32 or float64. They are
// added term by term, so they may differ from the host's in the last bit of double precision.
//
// Throws std::invalid_argument, before anything is sent, if an argument does not fit, and Error.
// Calls return at once; the stream does the work. The constructor loads the kernel, which the
// driver compiles once and caches. Thread-safe.
class DeviceGather {
 public:
  explicit DeviceGather(int device);

  int device() const { return context_->device(); }

  // The required size of the workspace for this number of leaves with targets of `target_bytes` in
  // total.
  static std::int64_t workspace_bytes(const SplitPlan& plan, std::size_t leaves,
                                      std::int64_t target_bytes);
  static std::int64_t workspace_bytes(const MultiStepPlan& plan, std::size_t leaves,
                                      std::int64_t target_bytes);

  void padded(const SplitPlan& plan, std::span<const ConstTensorView> sources,
              std::span<const TensorView> targets, Workspace workspace, Stream stream) const;
  void flat(const SplitPlan& plan, std::span<const ConstTensorView> sources,
            std::span<const TensorView> targets, Workspace workspace, Stream stream) const;

  // The leaves of one launch: `moved` are shifted and `summed` are summed.
  struct Ahead {
    std::span<const ConstTensorView> moved;
    std::span<const TensorView> moved_to;
    std::span<const ConstTensorView> summed;
    std::span<const TensorView> summed_to;
    double gamma = 1.0;
  };
  void ahead(const MultiStepPlan& plan, const Ahead& leaves, Workspace workspace,
             Stream stream) const;

 private:
  class Tables;

  void launch(const Tables& tables, Workspace workspace, Stream stream) const;

  std::shared_ptr<const Context> context_;
  Kernel kernel_;
  std::shared_ptr<Staging> staging_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
