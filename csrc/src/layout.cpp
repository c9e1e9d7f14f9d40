#include "pycollect/layout.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "pycollect/detail/checked.h"
#include "pycollect/header.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

class Fnv1a {
 public:
  void add(std::string_view bytes) {
    for (unsigned char byte : bytes) {
      hash_ = (hash_ ^ byte) * 0x100000001b3ULL;
    }
  }
  // Adds the length before the text, so that different sequences of texts never give the same
  // bytes.
  void add_text(std::string_view text) {
    add(std::to_string(text.size()) + ":");
    add(text);
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325ULL;
};

std::uint64_t fingerprint_of(std::span<const Leaf> leaves) {
  Fnv1a hash;
  for (const Leaf& leaf : leaves) {
    hash.add("leaf " + std::to_string(leaf.key.size()) + ";");
    for (const std::string& part : leaf.key) {
      hash.add_text(part);
    }
    hash.add_text(name_of(leaf.dtype));
    hash.add_text(to_string(leaf.shape));
  }
  return hash.value();
}

bool is_prefix(const Key& a, const Key& b) {
  return a.size() <= b.size() && std::equal(a.begin(), a.end(), b.begin());
}

void check_keys(std::span<const Leaf> leaves) {
  if (leaves.empty()) {
    throw std::invalid_argument("leaves: expected at least one, got none");
  }
  // After sorting, a prefix is directly before the first key that begins with it.
  std::vector<const Key*> keys;
  for (const Leaf& leaf : leaves) {
    if (leaf.key.empty()) {
      throw std::invalid_argument("leaves: expected keys with at least one name, got an empty key");
    }
    keys.push_back(&leaf.key);
  }
  std::sort(keys.begin(), keys.end(), [](const Key* a, const Key* b) { return *a < *b; });
  for (std::size_t i = 1; i < keys.size(); ++i) {
    if (is_prefix(*keys[i - 1], *keys[i])) {
      throw std::invalid_argument(
          "leaves: " + to_string(*keys[i - 1]) +
          (*keys[i - 1] == *keys[i]
               ? " occurs twice"
               : " is a leaf, so " + to_string(*keys[i]) + " cannot be a leaf"));
    }
  }
}

// A view of shape [*shape, *frame] that begins at `first`. Frames along the last dimension of
// `shape` are contiguous.
TensorView frames_of(const Leaf& leaf, std::byte* first, Dims shape, Dims strides) {
  strides.push_back(leaf.frame_bytes());
  const Dims frame = TensorView::contiguous(nullptr, leaf.dtype, leaf.shape).strides;
  for (int i = 0; i < leaf.shape.size(); ++i) {
    shape.push_back(leaf.shape[i]);
    strides.push_back(frame[i]);
  }
  return {first, leaf.dtype, shape, strides, Device{}};
}

}  // namespace

std::int64_t Leaf::frame_bytes() const {
  return checked_mul(element_count({shape.begin(), shape.end()}),
                     static_cast<std::int64_t>(item_size(dtype)));
}

Layout::Layout(std::vector<Leaf> leaves) : leaves_(std::move(leaves)) {
  check_keys(leaves_);
  constexpr int kMost = Dims::kMaxRank - 3;  // a batch has three more dimensions, [B, P, T]
  for (const Leaf& leaf : leaves_) {
    if (leaf.shape.size() > kMost) {
      throw std::invalid_argument("leaves: expected at most " + std::to_string(kMost) +
                                  " dimensions per frame, got " +
                                  std::to_string(leaf.shape.size()) + " in " + to_string(leaf.key));
    }
    leaf.frame_bytes();  // throws if the shape is invalid, as the next line does for its strides
    TensorView::contiguous(nullptr, leaf.dtype, leaf.shape);
  }
  fingerprint_ = fingerprint_of(leaves_);
}

int Layout::find(const Key& key) const {
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    if (leaves_[i].key == key) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

Layout standard_layout(const std::vector<Leaf>& observations, const std::vector<Leaf>& outputs,
                       StandardLeaves standard) {
  std::vector<Leaf> leaves;
  leaves.insert(leaves.end(), observations.begin(), observations.end());
  leaves.insert(leaves.end(), outputs.begin(), outputs.end());
  for (const Leaf& observation : observations) {
    leaves.push_back({Key("next") / observation.key, observation.dtype, observation.shape});
  }
  for (const char* flag : {"done", "terminated", "truncated"}) {
    leaves.push_back({flag, DType::boolean, {1}});
    leaves.push_back({Key("next", flag), DType::boolean, {1}});
  }
  leaves.push_back({"next.reward", DType::float32, {1}});
  leaves.push_back({"collector.traj_ids", DType::int64, {}});
  if (standard.policy_version) {
    leaves.push_back({"collector.policy_version", DType::int64, {}});
  }
  if (standard.step_count) {
    leaves.push_back({"step_count", DType::int64, {1}});
    leaves.push_back({"next.step_count", DType::int64, {1}});
  }
  if (standard.mask) {
    leaves.push_back({"collector.mask", DType::boolean, {}});
  }
  return Layout(std::move(leaves));
}

std::int64_t Geometry::frames() const { return checked_mul(checked_mul(workers, envs), steps); }

Placement::Placement(Layout layout, Geometry geometry)
    : layout_(std::move(layout)), geometry_(geometry) {
  if (geometry.workers < 1 || geometry.envs < 1 || geometry.steps < 1) {
    throw std::invalid_argument("geometry: expected workers, envs and steps >= 1, got " +
                                to_string(Dims{geometry.workers, geometry.envs, geometry.steps}));
  }
  header_bytes_ = align64(RolloutHeader::bytes_for(geometry.envs));
  std::int64_t end = checked_mul(header_bytes_, geometry.workers);
  for (const Leaf& leaf : layout_.leaves()) {
    offsets_.push_back(end);
    end = align64(checked_add(end, checked_mul(leaf.frame_bytes(), geometry.frames())));
  }
  bytes_ = end;
}

std::int64_t Placement::header_offset(std::int64_t row) const {
  if (row < 0 || row >= geometry_.workers) {
    throw std::out_of_range("row: expected 0 to " + std::to_string(geometry_.workers - 1) +
                            ", got " + std::to_string(row));
  }
  return row * header_bytes_;
}

Placement::RowStrides Placement::row_strides(std::size_t leaf) const {
  const auto [B, P, T, order] = geometry_;
  const std::int64_t row = T * layout_[leaf].frame_bytes();
  return order == Order::stack ? RowStrides{P * row, row} : RowStrides{row, B * row};
}

TensorView Placement::view(std::byte* base, std::size_t leaf) const {
  const auto [B, P, T, order] = geometry_;
  const auto [worker, env] = row_strides(leaf);
  return frames_of(layout_[leaf], base + offset(leaf), {B, P, T}, {worker, env});
}

TensorView Placement::rows(std::byte* base, std::size_t leaf, std::int64_t row) const {
  header_offset(row);  // throws for an unknown row
  const RowStrides strides = row_strides(leaf);
  return frames_of(layout_[leaf], base + offset(leaf) + row * strides.worker,
                   {geometry_.envs, geometry_.steps}, {strides.env});
}

}  // namespace pycollect::inline PYCOLLECT_ABI
