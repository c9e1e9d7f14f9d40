#include "pycollect/batch.h"

#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace pycollect::inline PYCOLLECT_ABI {

struct Batch::State {
  std::shared_ptr<Slab> slab;
  std::vector<Episode> episodes;
  std::vector<RolloutHeader> headers;
  std::once_flag split;
  std::optional<SplitPlan> trajectories;

  std::optional<TensorView> if_any(const Key& key) const {
    const int leaf = slab->placement().layout().find(key);
    return leaf < 0 ? std::nullopt
                    : std::optional(
                          slab->placement().view(slab->data(), static_cast<std::size_t>(leaf)));
  }
};

Batch::Batch(std::shared_ptr<Slab> slab, std::vector<Episode> episodes)
    : state_(std::make_shared<State>()) {
  if (!slab) {
    throw std::invalid_argument("slab: expected a slab, got null");
  }
  const std::span<const std::byte> bytes(slab->data(), static_cast<std::size_t>(slab->bytes()));
  for (std::int64_t row = 0; row < slab->placement().geometry().workers; ++row) {
    state_->headers.push_back(read_header(bytes, slab->placement(), row));
  }
  state_->slab = std::move(slab);
  state_->episodes = std::move(episodes);
}

TensorView Batch::view(const Key& key) const {
  if (const std::optional<TensorView> found = state_->if_any(key)) {
    return *found;
  }
  std::string known;
  for (const Leaf& leaf : layout().leaves()) {
    known += (known.empty() ? "" : ", ") + to_string(leaf.key);
  }
  throw std::out_of_range("key: expected one of " + known + ", got " + to_string(key));
}

TensorView Batch::view_of(const Key& key, DType dtype) const {
  const TensorView found = view(key);
  if (found.dtype != dtype) {
    throw std::invalid_argument(to_string(key) + ": expected " + std::string(name_of(found.dtype)) +
                                ", the type of the leaf, got " + std::string(name_of(dtype)));
  }
  if (!found.is_contiguous()) {
    throw std::invalid_argument(to_string(key) +
                                ": expected stacked workers, got workers that are "
                                "concatenated along time; use view()");
  }
  return found;
}

const Layout& Batch::layout() const { return state_->slab->placement().layout(); }

const Geometry& Batch::geometry() const { return state_->slab->placement().geometry(); }

std::int64_t Batch::frames() const {
  std::int64_t frames = 0;
  for (const RolloutHeader& header : state_->headers) {
    frames += header.frames;
  }
  return frames;
}

std::span<const RolloutHeader> Batch::headers() const { return state_->headers; }

const RolloutHeader& Batch::header(std::int64_t row) const {
  if (row < 0 || row >= geometry().workers) {
    throw std::out_of_range("row: expected 0 to " + std::to_string(geometry().workers - 1) +
                            ", got " + std::to_string(row));
  }
  return state_->headers[static_cast<std::size_t>(row)];
}

std::span<const Batch::Episode> Batch::episodes() const { return state_->episodes; }

const SplitPlan& Batch::trajectories() const {
  std::call_once(state_->split, [state = state_.get()] {
    state->trajectories.emplace(state->if_any("next.done"), state->if_any("collector.traj_ids"),
                                state->if_any("collector.mask"), 3);
  });
  return *state_->trajectories;
}

const std::shared_ptr<Slab>& Batch::lease() const { return state_->slab; }

}  // namespace pycollect::inline PYCOLLECT_ABI
