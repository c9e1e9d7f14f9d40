// DeviceGather: split and multistep for batches in device memory, one launch for all leaves.
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

// Device memory that a gather may use until its stream has done it: lent by the caller, whose
// allocator knows streams.
struct Workspace {
  DevicePointer address = 0;  // a multiple of 64
  std::int64_t bytes = 0;
};

class Staging;

// Does on a device what SplitPlan::padded() and flat() and MultiStepPlan::shift() and sum() do on
// the host, by their plans. Plans are made on the host, from the flags and ids there; what is sent
// is a table of some 64 bytes per trajectory and per 16 KiB of a target, from pinned memory of its
// own, so the host does not wait for the device.
//
// Sources and targets are views of device memory, as those functions take them, except: types are
// not cast; a target is contiguous; so are a source's frames, and its rows lie at equal distances.
// Sums are of float32 and float64, term by term, so that they may differ from the host's in the
// last bit of double precision. Throws std::invalid_argument, before anything is sent, where
// something does not fit, and Error.
//
// Calls return at once: the stream does what they ask for. Making one loads the kernel (the driver
// compiles it once and caches that). Thread-safe.
class DeviceGather {
 public:
  explicit DeviceGather(int device);

  int device() const { return context_->device(); }

  // How large the workspace has to be for that many leaves, whose targets have so many bytes in
  // all.
  static std::int64_t workspace_bytes(const SplitPlan& plan, std::size_t leaves,
                                      std::int64_t target_bytes);
  static std::int64_t workspace_bytes(const MultiStepPlan& plan, std::size_t leaves,
                                      std::int64_t target_bytes);

  void padded(const SplitPlan& plan, std::span<const ConstTensorView> sources,
              std::span<const TensorView> targets, Workspace workspace, Stream stream) const;
  void flat(const SplitPlan& plan, std::span<const ConstTensorView> sources,
            std::span<const TensorView> targets, Workspace workspace, Stream stream) const;

  // Which leaves of a batch become what, by one launch: those that shift, and those that are
  // summed.
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
