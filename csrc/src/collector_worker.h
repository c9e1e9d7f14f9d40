// Worker: environments, a policy and a Recorder, and the loop over them. One thread at a time.
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

// A policy as it was given, which each worker makes its own of.
struct Version {
  std::int64_t number;
  AnyPolicy policy;
};

// What a worker is asked for.
struct Order {
  std::shared_ptr<Slab> slab;
  std::int64_t row;
  std::shared_ptr<const Version> version;
};

class Worker {
 public:
  // Throws std::invalid_argument where the environments are not as many as the options say.
  Worker(const CollectorOptions& options, std::int64_t index,
         std::unique_ptr<AnyEnvBatch> environments, const std::vector<Leaf>& outputs);

  const Layout& layout() const { return layout_; }

  // Records a rollout into the order's row and returns the episodes that ended in it; nothing where
  // `stopping` became true before its end. Whatever throws or stops it, the rollout is given up and
  // the next one begins with environments that were reset.
  std::optional<std::vector<Batch::Episode>> collect(Order order,
                                                     const std::atomic<bool>& stopping);

 private:
  void take(const std::shared_ptr<const Version>& version);
  void reset_all();

  CollectorOptions options_;
  std::int64_t index_;
  SteppedEnvs environments_;
  Layout layout_;
  StepArrays outputs_;                   // of the policy: actions first
  std::vector<ConstTensorView> chosen_;  // the same, as who reads them has them
  std::size_t actions_;                  // how many of them are actions
  std::unique_ptr<Recorder> recorder_;
  std::shared_ptr<const Version> version_;
  Roll roll_;
  std::int64_t sequence_ = 0;
  bool running_ = false;  // environments stand where the last rollout ended
};

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
