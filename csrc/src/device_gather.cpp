#include "pycollect/device_gather.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cuda/gather.h"
#include "batch_rows.h"
#include "pycollect/detail/checked.h"
#include "staging.h"

namespace pycollect::inline PYCOLLECT_ABI::cuda {
namespace {

using gather::Leaf;
using gather::Run;
using gather::Tile;

constexpr const char* kPtx =
#include "gather_ptx.inc"
    ;

template <typename Item>
std::int64_t part_bytes(std::int64_t count) {
  return align64(checked_mul(count, static_cast<std::int64_t>(sizeof(Item))));
}

std::int64_t table_bytes(std::int64_t runs, std::int64_t leaves, std::int64_t tiles) {
  return checked_add(checked_add(part_bytes<Run>(runs), part_bytes<Leaf>(leaves)),
                     part_bytes<Tile>(tiles));
}

// Maximum number of tiles for leaves with targets of `bytes` bytes in total. A tile of sums has
// 1,024 numbers of at least four bytes.
std::int64_t most_tiles(std::int64_t leaves, std::int64_t bytes) {
  constexpr std::int64_t kLeast = std::int64_t{gather::kTileNumbers} * 4;
  return checked_add(bytes / kLeast, leaves);
}

std::int64_t most_runs(const SplitPlan& plan) { return checked_mul(plan.count(), 2); }

std::int64_t most_runs(const MultiStepPlan& plan) {
  return checked_mul(static_cast<std::int64_t>(plan.pieces().size()), 2);
}

// The frames of each trajectory, followed by zeros if `padded`.
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

// For each segment: the frames that look n steps ahead, then those that look at its last frame.
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

void expect_on_device(const std::string& what, const pycollect::Device& given, int device) {
  if (!(given == pycollect::Device{DeviceKind::cuda, device})) {
    throw std::invalid_argument(what + ": expected an array on CUDA device " +
                                std::to_string(device) + ", got one on another device");
  }
}

// Distance between rows of the batch in bytes. Throws std::invalid_argument if it varies.
std::int64_t row_stride(const std::string& what, const ConstTensorView& source, const Dims& batch) {
  std::optional<std::int64_t> stride;
  std::int64_t next = 0;  // required stride of the next outer dimension
  for (int i = batch.size() - 2; i >= 0; --i) {
    if (batch[i] == 1) {
      continue;
    }
    if (stride && source.strides[i] != next) {
      throw std::invalid_argument(
          what +
          ": expected rows at equal distances, got other strides; make the array contiguous");
    }
    stride = stride.value_or(source.strides[i]);
    next = source.strides[i] * batch[i];
  }
  return stride.value_or(0);
}

}  // namespace

// The tables of a launch: runs, leaves and tiles.
class DeviceGather::Tables {
 public:
  Tables(int device, const Dims& batch, std::vector<Run> runs)
      : device_(device), batch_(batch), runs_(std::move(runs)) {}

  // Adds a leaf: frames of `source`, [*batch, *frame], go to `target`, [*lead, *frame].
  void add(const char* name, std::size_t i, const ConstTensorView& source, const TensorView& target,
           const Dims& lead, bool summed) {
    const std::string what = named(name, i);
    const ConstTensorView frame = from_dimension(source, batch_.size());
    expect_on_device(what, source.device, device_);
    expect_on_device(named("target", i), target.device, device_);
    check_target(i, target, joined(lead, source.shape.from(batch_.size())));
    const std::int64_t bytes = frame.bytes();
    if (bytes == 0 || runs_.empty()) {
      return;
    }
    if (target.dtype != source.dtype || !target.is_contiguous() || !frame.is_contiguous()) {
      throw std::invalid_argument(what +
                                  ": expected contiguous frames and a contiguous target of type " +
                                  std::string(name_of(source.dtype)));
    }
    Leaf leaf{};
    leaf.row_stride = row_stride(what, source, batch_);
    leaf.source = reinterpret_cast<DevicePointer>(source.data);
    leaf.target = reinterpret_cast<DevicePointer>(target.data);
    leaf.time_stride = source.strides[batch_.size() - 1];
    leaf.frames = target.count() / frame.count();
    leaf.kind = summed ? sum_kind(what, source.dtype) : gather::kCopy;
    const std::int64_t items = summed ? frame.count() : bytes;
    if (items >= std::int64_t{1} << 31) {
      throw std::invalid_argument(what + ": expected frames of less than 2^31 bytes");
    }
    leaf.items = static_cast<std::uint32_t>(items);
    leaf.per_items = items == 1 ? std::numeric_limits<std::uint32_t>::max()
                                : static_cast<std::uint32_t>((std::uint64_t{1} << 32) / leaf.items);
    add_tiles(leaf, summed ? gather::kTileNumbers : gather::kTileBytes);
    leaves_.push_back(leaf);
  }

  bool empty() const { return leaves_.empty(); }

  unsigned blocks() const {
    if (tiles_.size() > std::numeric_limits<std::int32_t>::max()) {
      throw std::length_error("gather: the leaves are too large for one launch");
    }
    return static_cast<unsigned>(tiles_.size());
  }

  // The contents of the workspace: the runs, the leaves, the tiles.
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all(
        static_cast<std::size_t>(table_bytes(count(runs_), count(leaves_), count(tiles_))));
    std::memcpy(all.data(), runs_.data(), runs_.size() * sizeof(Run));
    std::memcpy(all.data() + leaves_at(), leaves_.data(), leaves_.size() * sizeof(Leaf));
    std::memcpy(all.data() + tiles_at(), tiles_.data(), tiles_.size() * sizeof(Tile));
    return all;
  }

  gather::Parameters parameters(DevicePointer workspace) const {
    const auto at = [workspace](std::int64_t offset) {
      return workspace + static_cast<DevicePointer>(offset);
    };
    return {reinterpret_cast<const Leaf*>(at(leaves_at())),
            reinterpret_cast<const Run*>(workspace),
            reinterpret_cast<const Tile*>(at(tiles_at())),
            count(runs_),
            batch_[batch_.size() - 1],
            gamma};
  }

  double gamma = 1.0;

 private:
  template <typename Item>
  static std::int64_t count(const std::vector<Item>& items) {
    return static_cast<std::int64_t>(items.size());
  }
  std::int64_t leaves_at() const { return part_bytes<Run>(count(runs_)); }
  std::int64_t tiles_at() const { return leaves_at() + part_bytes<Leaf>(count(leaves_)); }

  // Adds the tiles of the next leaf, with the runs that each tile overlaps.
  void add_tiles(const Leaf& leaf, std::int64_t tile_items) {
    const std::int64_t items = checked_mul(leaf.frames, leaf.items);
    std::size_t run = 0;
    const auto find = [&](std::int64_t frame) {
      while (run + 1 < runs_.size() && runs_[run + 1].target <= frame) {
        ++run;
      }
      return static_cast<std::uint32_t>(run);
    };
    for (std::int64_t first = 0; first < items; first += tile_items) {
      Tile tile{};
      tile.first_item = first;
      tile.first_frame = first / leaf.items;
      tile.before = static_cast<std::uint32_t>(first - tile.first_frame * leaf.items);
      tile.leaf = static_cast<std::uint32_t>(leaves_.size());
      tile.first_run = find(tile.first_frame);
      tile.last_run = find((std::min(first + tile_items, items) - 1) / leaf.items);
      tiles_.push_back(tile);
    }
  }

  static std::int32_t sum_kind(const std::string& what, DType dtype) {
    if (dtype != DType::float32 && dtype != DType::float64) {
      throw std::invalid_argument(what + ": expected float32 or float64, got " +
                                  std::string(name_of(dtype)));
    }
    return dtype == DType::float32 ? gather::kSumFloat32 : gather::kSumFloat64;
  }

  int device_;
  Dims batch_;
  std::vector<Run> runs_;
  std::vector<Leaf> leaves_;
  std::vector<Tile> tiles_;
};

DeviceGather::DeviceGather(int device)
    : context_(Context::of(device)),
      kernel_(context_, kPtx, "pycollect_gather"),
      staging_(std::make_shared<Staging>(context_)) {}

std::int64_t DeviceGather::workspace_bytes(const SplitPlan& plan, std::size_t leaves,
                                           std::int64_t target_bytes) {
  const auto count = static_cast<std::int64_t>(leaves);
  return table_bytes(most_runs(plan), count, most_tiles(count, target_bytes));
}

std::int64_t DeviceGather::workspace_bytes(const MultiStepPlan& plan, std::size_t leaves,
                                           std::int64_t target_bytes) {
  const auto count = static_cast<std::int64_t>(leaves);
  return table_bytes(most_runs(plan), count, most_tiles(count, target_bytes));
}

void DeviceGather::padded(const SplitPlan& plan, std::span<const ConstTensorView> sources,
                          std::span<const TensorView> targets, Workspace workspace,
                          Stream stream) const {
  check_batch(sources, targets, plan.batch());
  Tables tables(device(), plan.batch(), runs_of(plan, true));
  for (std::size_t i = 0; i < sources.size(); ++i) {
    tables.add("source", i, sources[i], targets[i], Dims{plan.count(), plan.longest()}, false);
  }
  launch(tables, workspace, stream);
}

void DeviceGather::flat(const SplitPlan& plan, std::span<const ConstTensorView> sources,
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
  staging_->send(workspace.address, bytes, stream);
  const gather::Parameters parameters = tables.parameters(workspace.address);
  kernel_.launch(blocks, gather::kThreads, &parameters, stream);
}

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
