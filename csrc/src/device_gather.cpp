#include "pycollect/device_gather.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cuda/gather.h"
#include "batch_rows.h"
#include "pycollect/detail/checked.h"

namespace pycollect::inline PYCOLLECT_ABI::cuda {
namespace {

using gather::Leaf;
using gather::Run;

constexpr const char* kPtx =
#include "gather_ptx.inc"
    ;

std::int64_t table_bytes(std::int64_t runs, std::int64_t leaves) {
  return checked_add(align64(checked_mul(runs, sizeof(Run))), checked_mul(leaves, sizeof(Leaf)));
}

std::int64_t most_runs(const SplitPlan& plan) { return checked_mul(plan.count(), 2); }

std::int64_t most_runs(const MultiStepPlan& plan) {
  return checked_mul(static_cast<std::int64_t>(plan.pieces().size()), 2);
}

// The frames of each trajectory, and with `padded` zeros behind them.
std::vector<Run> runs_of(const SplitPlan& plan, bool padded) {
  std::vector<Run> runs;
  runs.reserve(static_cast<std::size_t>(most_runs(plan)));
  std::int64_t target = 0;
  for (const auto& [row, start, length] : plan.segments()) {
    runs.push_back({target, row, start, 1, gather::kFrames});
    if (padded && length < plan.longest()) {
      runs.push_back({target + length, 0, 0, 0, gather::kNothing});
    }
    target += padded ? plan.longest() : length;
  }
  return runs;
}

// Of each segment those frames that look n steps ahead, and those that look at its last.
std::vector<Run> runs_of(const MultiStepPlan& plan) {
  const std::int64_t steps = plan.batch()[plan.batch().size() - 1];
  std::vector<Run> runs;
  runs.reserve(static_cast<std::size_t>(most_runs(plan)));
  for (const auto& [cells, collected] : plan.pieces()) {
    const std::int64_t target = cells.row * steps + cells.start;
    if (!collected) {
      runs.push_back({target, cells.row, cells.start, 1, gather::kUncollected});
      continue;
    }
    const std::int64_t ahead = std::min(plan.n_steps() - 1, cells.length);
    if (ahead < cells.length) {
      runs.push_back({target, cells.row, cells.start + ahead, 1, gather::kFrames});
    }
    if (ahead > 0) {
      runs.push_back({target + cells.length - ahead, cells.row, cells.start + cells.length - 1, 0,
                      gather::kFrames});
    }
  }
  return runs;
}

std::string named(const char* what, std::size_t i) {
  return std::string(what).append(" ").append(std::to_string(i));
}

void expect_on_device(const std::string& what, const TensorView& view, int device) {
  if (!(view.device == pycollect::Device{DeviceKind::cuda, device})) {
    throw std::invalid_argument(what + ": expected an array on CUDA device " +
                                std::to_string(device) + ", got one elsewhere");
  }
}

// How far the batch's rows lie from each other; throws where that is not one distance.
std::int64_t row_stride(const std::string& what, const TensorView& source, const Dims& batch) {
  std::optional<std::int64_t> stride;
  std::int64_t next = 0;  // the stride that a further dimension outwards has to have
  for (int i = batch.size() - 2; i >= 0; --i) {
    if (batch[i] == 1) {
      continue;
    }
    if (stride && source.strides[i] != next) {
      throw std::invalid_argument(what + ": expected rows at equal distances; make it contiguous");
    }
    stride = stride.value_or(source.strides[i]);
    next = source.strides[i] * batch[i];
  }
  return stride.value_or(0);
}

}  // namespace

// What a launch is given: runs, and the leaves that are moved by them.
class DeviceGather::Tables {
 public:
  Tables(int device, const Dims& batch, std::vector<Run> runs)
      : device_(device), batch_(batch), runs_(std::move(runs)) {}

  // Frames of `source`, which begins with the batch's dimensions, to `target`, which begins with
  // `lead`.
  void add(const char* name, std::size_t i, const TensorView& source, const TensorView& target,
           const Dims& lead, bool summed) {
    const std::string what = named(name, i);
    const TensorView frame = from_dimension(source, batch_.size());
    expect_on_device(what, source, device_);
    expect_on_device(named("target", i), target, device_);
    check_target(i, target, joined(lead, source.shape.from(batch_.size())));
    const std::int64_t bytes = frame.bytes();
    if (bytes == 0 || runs_.empty()) {
      return;
    }
    if (target.dtype != source.dtype || !target.is_contiguous() || !frame.is_contiguous()) {
      throw std::invalid_argument(what +
                                  ": expected contiguous frames, and a contiguous target of " +
                                  std::string(name_of(source.dtype)));
    }
    Leaf leaf{};
    leaf.row_stride = row_stride(what, source, batch_);
    leaf.source = reinterpret_cast<DevicePointer>(source.data);
    leaf.target = reinterpret_cast<DevicePointer>(target.data);
    leaf.time_stride = source.strides[batch_.size() - 1];
    leaf.frames = target.count() / frame.count();
    leaf.first_tile = tiles_;
    leaf.kind = summed ? sum_kind(what, source.dtype) : gather::kCopy;
    leaf.unit = summed ? static_cast<std::uint32_t>(item_size(source.dtype)) : unit_of(leaf, bytes);
    const std::int64_t units = bytes / leaf.unit;
    if (units > std::numeric_limits<std::int32_t>::max()) {
      throw std::invalid_argument(what + ": expected frames below 2^31 elements");
    }
    leaf.units = static_cast<std::uint32_t>(units);
    tiles_ = checked_add(tiles_, (checked_mul(leaf.frames, units) - 1) / gather::kTile + 1);
    leaves_.push_back(leaf);
  }

  bool empty() const { return leaves_.empty(); }

  unsigned blocks() const {
    if (tiles_ > std::numeric_limits<std::int32_t>::max()) {
      throw std::length_error("gather: the leaves are too large for one launch");
    }
    return static_cast<unsigned>(tiles_);
  }

  // As they lie in the workspace: the runs, then the leaves.
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all(static_cast<std::size_t>(table_bytes(run_count(), leaf_count())));
    std::memcpy(all.data(), runs_.data(), runs_.size() * sizeof(Run));
    std::memcpy(all.data() + align64(run_count() * static_cast<std::int64_t>(sizeof(Run))),
                leaves_.data(), leaves_.size() * sizeof(Leaf));
    return all;
  }

  gather::Parameters parameters(DevicePointer workspace) const {
    const auto leaves =
        workspace +
        static_cast<DevicePointer>(align64(run_count() * static_cast<std::int64_t>(sizeof(Run))));
    return {reinterpret_cast<const Leaf*>(leaves),
            reinterpret_cast<const Run*>(workspace),
            leaf_count(),
            run_count(),
            batch_[batch_.size() - 1],
            gamma};
  }

  double gamma = 1.0;

 private:
  std::int64_t run_count() const { return static_cast<std::int64_t>(runs_.size()); }
  std::int64_t leaf_count() const { return static_cast<std::int64_t>(leaves_.size()); }

  static std::int32_t sum_kind(const std::string& what, DType dtype) {
    if (dtype != DType::float32 && dtype != DType::float64) {
      throw std::invalid_argument(what + ": expected float32 or float64, got " +
                                  std::string(name_of(dtype)));
    }
    return dtype == DType::float32 ? gather::kSumFloat32 : gather::kSumFloat64;
  }

  // The largest power of two, up to 16, that all addresses of frames and their size are multiples
  // of.
  static std::uint32_t unit_of(const Leaf& leaf, std::int64_t frame_bytes) {
    const auto bits = leaf.source | leaf.target | static_cast<std::uint64_t>(leaf.row_stride) |
                      static_cast<std::uint64_t>(leaf.time_stride) |
                      static_cast<std::uint64_t>(frame_bytes) | 16U;
    return 1U << std::countr_zero(bits);
  }

  int device_;
  Dims batch_;
  std::vector<Run> runs_;
  std::vector<Leaf> leaves_;
  std::int64_t tiles_ = 0;
};

DeviceGather::DeviceGather(int device)
    : context_(Context::of(device)), kernel_(context_, kPtx, "pycollect_gather") {}

std::int64_t DeviceGather::workspace_bytes(const SplitPlan& plan, std::size_t leaves) {
  return table_bytes(most_runs(plan), static_cast<std::int64_t>(leaves));
}

std::int64_t DeviceGather::workspace_bytes(const MultiStepPlan& plan, std::size_t leaves) {
  return table_bytes(most_runs(plan), static_cast<std::int64_t>(leaves));
}

void DeviceGather::padded(const SplitPlan& plan, std::span<const TensorView> sources,
                          std::span<const TensorView> targets, Workspace workspace,
                          Stream stream) const {
  check_batch(sources, targets, plan.batch());
  Tables tables(device(), plan.batch(), runs_of(plan, true));
  for (std::size_t i = 0; i < sources.size(); ++i) {
    tables.add("source", i, sources[i], targets[i], Dims{plan.count(), plan.longest()}, false);
  }
  launch(tables, workspace, stream);
}

void DeviceGather::flat(const SplitPlan& plan, std::span<const TensorView> sources,
                        std::span<const TensorView> targets, Workspace workspace,
                        Stream stream) const {
  check_batch(sources, targets, plan.batch());
  Tables tables(device(), plan.batch(), runs_of(plan, false));
  for (std::size_t i = 0; i < sources.size(); ++i) {
    tables.add("source", i, sources[i], targets[i], Dims{plan.frames()}, false);
  }
  launch(tables, workspace, stream);
}

void DeviceGather::ahead(const MultiStepPlan& plan, const Ahead& leaves, Workspace workspace,
                         Stream stream) const {
  check_batch(leaves.moved, leaves.moved_to, plan.batch());
  check_batch(leaves.summed, leaves.summed_to, plan.batch());
  Tables tables(device(), plan.batch(), runs_of(plan));
  tables.gamma = leaves.gamma;
  for (std::size_t i = 0; i < leaves.moved.size(); ++i) {
    tables.add("moved", i, leaves.moved[i], leaves.moved_to[i], plan.batch(), false);
  }
  for (std::size_t i = 0; i < leaves.summed.size(); ++i) {
    tables.add("summed", i, leaves.summed[i], leaves.summed_to[i], plan.batch(), true);
  }
  launch(tables, workspace, stream);
}

void DeviceGather::launch(const Tables& tables, Workspace workspace, Stream stream) const {
  if (tables.empty()) {
    return;
  }
  const unsigned blocks = tables.blocks();
  const std::vector<std::byte> bytes = tables.bytes();
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (workspace.bytes < size || workspace.address % 64 != 0) {
    throw std::invalid_argument("workspace: expected " + std::to_string(size) +
                                " bytes at a multiple of 64, got " +
                                std::to_string(workspace.bytes));
  }
  // Ordinary memory: the driver has read it when this returns.
  context_->copy_to_device(workspace.address, bytes.data(), size, stream);
  const gather::Parameters parameters = tables.parameters(workspace.address);
  kernel_.launch(blocks, gather::kThreads, &parameters, stream);
}

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
