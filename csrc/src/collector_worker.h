// Worker: the environments, policy and Recorder of one worker, and its collection loop. Used by one
// thread at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pycollect/batch.h"
#include "pycollect/detail/collection.h"
#include "pycollect/detail/step_arrays.h"
#include "pycollect/detail/stepped_envs.h"
#include "pycollect/recorder.h"
#include "pycollect/slab.h"

namespace pycollect::inline PYCOLLECT_ABI::detail {

// A numbered policy. Each worker makes its own copy of it.
struct Version {
  std::int64_t number;
  AnyPolicy policy;
};

// A request for one rollout.
struct Order {
  std::shared_ptr<Slab> slab;
  std::int64_t row;
  std::shared_ptr<const Version> version;
};

class Worker {
 public:
  // Throws std::invalid_argument if the number of environments differs from the options.
  Worker(const CollectorOptions& options, std::int64_t index,
         std::unique_ptr<AnyEnvBatch> environments, const std::vector<Leaf>& outputs);

  const Layout& layout() const { return layout_; }

  // Records a rollout into the order's row and returns the episodes that ended in it. Returns
  // nothing if `stopping` became true first. If the rollout throws or stops, it is abandoned, and
  // the next one begins with a reset of all environments.
  std::optional<std::vector<Batch::Episode>> collect(Order order,
                                                     const std::atomic<bool>& stopping);

 private:
  void take(const std::shared_ptr<const Version>& version);
  void reset_all();

  CollectorOptions options_;
  std::int64_t index_;
  SteppedEnvs environments_;
  Layout layout_;
  StepArrays outputs_;                   // the policy's outputs, actions first
  std::vector<ConstTensorView> chosen_;  // read-only views of them
  std::size_t actions_;                  // number of actions among the outputs
  std::unique_ptr<Recorder> recorder_;
  std::shared_ptr<const Version> version_;
  Roll roll_;
  std::int64_t sequence_ = 0;
  bool running_ = false;  // the environments can continue after the last rollout
};

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
