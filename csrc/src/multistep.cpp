#include "pycollect/multistep.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "batch_rows.h"
#include "pycollect/copy.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

// Minimum number of frames per chunk of a sum. The sums of a chunk fit into the first-level cache.
constexpr std::int64_t kSumFrames = 1024;

// Address of a cell.
template <typename View>
auto cell_of(const View& view, const Dims& batch, std::int64_t row, std::int64_t t) {
  return view.data + row_offset(view, batch, row) + t * view.strides[batch.size() - 1];
}

// The view of one row, beginning with the time dimension. Its address is not used.
template <typename View>
View row_of(const View& view, const Dims& batch) {
  return from_dimension(view, batch.size() - 1);
}

std::vector<double> powers_of(double gamma, std::int64_t count) {
  std::vector<double> powers;
  double power = 1.0;
  for (std::int64_t i = 0; i < count; ++i, power *= gamma) {
    powers.push_back(power);
  }
  return powers;
}

// Sets out[t], for t < wanted, to the sum of powers[k] * in[t + k] over k < n and t + k < given,
// for each of `width` contiguous lanes. `powers` has all k that occur. Each sum has two parts: the
// rest of its own block of n, summed backward, and the beginning of the next block, summed forward.
// `running` is scratch memory for `width` sums.
void sum_ahead(const double* in, std::int64_t given, double* out, std::int64_t wanted,
               std::int64_t width, std::int64_t n, std::span<const double> powers,
               std::vector<double>& running) {
  const double gamma = powers.size() > 1 ? powers[1] : 0.0;
  for (std::int64_t begin = 0; begin < wanted; begin += n) {
    const std::int64_t end = n < given - begin ? begin + n : given;
    std::fill(running.begin(), running.end(), 0.0);
    for (std::int64_t t = end - 1; t >= begin; --t) {
      for (std::int64_t lane = 0; lane < width; ++lane) {
        double& sum = running[static_cast<std::size_t>(lane)];
        // The last number is copied, because 0 * gamma + x could change a NaN and would turn -0
        // into 0.
        sum = t == end - 1 ? in[t * width + lane] : in[t * width + lane] + gamma * sum;
        if (t < wanted) {
          out[t * width + lane] = sum;
        }
      }
    }
    if (end == given) {
      return;
    }
    std::fill(running.begin(), running.end(), 0.0);
    for (std::int64_t t = begin + 1; t < std::min(end, wanted); ++t) {
      const std::int64_t k = t - begin - 1;
      for (std::int64_t lane = 0; lane < width; ++lane) {
        double& sum = running[static_cast<std::size_t>(lane)];
        if (end + k < given) {
          sum += powers[static_cast<std::size_t>(k)] * in[(end + k) * width + lane];
        }
        out[t * width + lane] += powers[static_cast<std::size_t>(end - t)] * sum;
      }
    }
  }
}

}  // namespace

template <typename Visit>
void MultiStepPlan::walk(std::int64_t begin, std::int64_t end, const Visit& visit) const {
  const std::int64_t steps = batch_[batch_.size() - 1];
  const auto first_cell = [steps](const Piece& piece) {
    return piece.cells.row * steps + piece.cells.start;
  };
  auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                [&](std::int64_t cell, const Piece& candidate) {
                                  return cell < first_cell(candidate);
                                }) -
               1;
  for (; begin < end; ++piece) {
    const std::int64_t first = first_cell(*piece);
    const std::int64_t last = std::min(end, first + piece->cells.length);
    visit(*piece, begin - first, last - first);
    begin = last;
  }
}

// Moves the frames of one leaf ahead by n - 1 steps.
class MultiStepPlan::Shift {
 public:
  Shift(const MultiStepPlan& plan, const ConstTensorView& source, const TensorView& target,
        Stores stores)
      : plan_(plan),
        source_(source),
        target_(target),
        run_(row_of(target, plan.batch_), row_of(source, plan.batch_), stores),
        repeat_(row_of(target, plan.batch_), repeated(row_of(source, plan.batch_)), stores),
        frame_bytes_(from_dimension(target, plan.batch_.size()).bytes()) {}

  std::int64_t frame_bytes() const { return frame_bytes_; }

  void write(std::int64_t begin, std::int64_t end) const {
    plan_.walk(begin, end, [this](const Piece& piece, std::int64_t from, std::int64_t to) {
      const std::int64_t ahead = piece.collected ? plan_.n_steps_ - 1 : 0;
      const Segment& cells = piece.cells;
      // The remaining frames look ahead to the last frame of the segment or beyond it.
      const std::int64_t tail = std::clamp(cells.length - ahead, from, to);
      std::byte* target = target_at(cells, from);
      if (from < tail) {
        run_(target, source_at(cells, from + ahead), tail - from);
      }
      repeat_(target + (tail - from) * target_.strides[plan_.batch_.size() - 1],
              source_at(cells, cells.length - 1), to - tail);
    });
  }

 private:
  static ConstTensorView repeated(ConstTensorView row) {
    row.strides[0] = 0;
    return row;
  }

  const std::byte* source_at(const Segment& cells, std::int64_t t) const {
    return cell_of(source_, plan_.batch_, cells.row, cells.start + t);
  }
  std::byte* target_at(const Segment& cells, std::int64_t t) const {
    return cell_of(target_, plan_.batch_, cells.row, cells.start + t);
  }

  const MultiStepPlan& plan_;
  ConstTensorView source_;
  TensorView target_;
  RunCopy run_;
  RunCopy repeat_;
  std::int64_t frame_bytes_;
};

// Sums the frames of one leaf. The cells of a segment are processed in chunks; a chunk belongs to
// the range that contains its first cell. A chunk also reads the n - 1 cells after it, so it must
// not be much shorter than n.
class MultiStepPlan::Sum {
 public:
  Sum(const MultiStepPlan& plan, std::span<const double> powers, const ConstTensorView& source,
      const TensorView& target)
      : plan_(plan),
        powers_(powers),
        source_(source),
        target_(target),
        width_(element_count(source.shape.from(plan.batch_.size()))),
        load_(numbers(), row_of(source, plan.batch_)),
        store_(row_of(target, plan.batch_), numbers()) {}

  std::int64_t frame_bytes() const { return width_ * static_cast<std::int64_t>(sizeof(double)); }

  void write(std::int64_t begin, std::int64_t end) const {
    const std::int64_t n = std::min(plan_.n_steps_, plan_.longest_);
    const std::int64_t chunk = std::max(kSumFrames, n);
    std::vector<double> in;
    std::vector<double> out;
    std::vector<double> running(static_cast<std::size_t>(width_));
    plan_.walk(begin, end, [&](const Piece& piece, std::int64_t from, std::int64_t to) {
      for (std::int64_t t = (from + chunk - 1) / chunk * chunk; t < to; t += chunk) {
        const std::int64_t wanted = std::min(chunk, piece.cells.length - t);
        out.assign(static_cast<std::size_t>(wanted * width_), 0.0);
        if (piece.collected) {
          const std::int64_t given = std::min(chunk + n - 1, piece.cells.length - t);
          in.resize(static_cast<std::size_t>(given * width_));
          load_(bytes_of(in), source_at(piece.cells, t), given);
          sum_ahead(in.data(), given, out.data(), wanted, width_, n, powers_, running);
        }
        store_(target_at(piece.cells, t), bytes_of(out), wanted);
      }
    });
  }

 private:
  // Contiguous frames of doubles.
  TensorView numbers() const {
    Dims shape{1};
    for (std::int64_t extent : source_.shape.from(plan_.batch_.size())) {
      shape.push_back(extent);
    }
    return TensorView::contiguous(nullptr, DType::float64, shape);
  }

  const std::byte* source_at(const Segment& cells, std::int64_t t) const {
    return cell_of(source_, plan_.batch_, cells.row, cells.start + t);
  }
  std::byte* target_at(const Segment& cells, std::int64_t t) const {
    return cell_of(target_, plan_.batch_, cells.row, cells.start + t);
  }

  static std::byte* bytes_of(std::vector<double>& values) {
    return reinterpret_cast<std::byte*>(values.data());
  }

  const MultiStepPlan& plan_;
  std::span<const double> powers_;
  ConstTensorView source_;
  TensorView target_;
  std::int64_t width_;
  RunCopy load_;
  RunCopy store_;
};

MultiStepPlan::MultiStepPlan(const SplitPlan& split, std::int64_t n_steps)
    : batch_(split.batch()), n_steps_(n_steps), longest_(split.longest()) {
  if (n_steps < 1) {
    throw std::invalid_argument("n_steps: expected at least 1, got " + std::to_string(n_steps));
  }
  const std::span<const Segment> segments = split.segments();
  const std::int64_t steps = batch_[batch_.size() - 1];
  pieces_.reserve(segments.size());
  auto next = segments.begin();
  for (std::int64_t row = 0, rows = row_count(batch_); row < rows; ++row) {
    std::int64_t end = 0;
    for (; next != segments.end() && next->row == row; ++next) {
      add(row, end, next->start, false);
      end = next->start + next->length;
      add(row, next->start, end, true);
    }
    add(row, end, steps, false);
  }
}

void MultiStepPlan::add(std::int64_t row, std::int64_t start, std::int64_t end, bool collected) {
  if (start < end) {
    pieces_.push_back({{row, start, end - start}, collected});
  }
}

std::int64_t MultiStepPlan::cells() const { return element_count({batch_.begin(), batch_.end()}); }

void MultiStepPlan::shift(ThreadPool& pool, std::span<const ConstTensorView> sources,
                          std::span<const TensorView> targets) const {
  check_leaves(sources, targets, batch_);
  const Stores stores = stores_for(total_bytes(targets));
  std::vector<Shift> leaves;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    check_target(i, targets[i], sources[i].shape);
    if (const Shift leaf(*this, sources[i], targets[i], stores); leaf.frame_bytes() > 0) {
      leaves.push_back(leaf);
    }
  }
  share_out(pool, leaves, cells());
}

void MultiStepPlan::sum(ThreadPool& pool, double gamma, std::span<const ConstTensorView> sources,
                        std::span<const TensorView> targets) const {
  check_leaves(sources, targets, batch_);
  const std::vector<double> powers = powers_of(gamma, std::min(n_steps_, longest_));
  std::vector<Sum> leaves;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    check_target(i, targets[i], sources[i].shape);
    if (const Sum leaf(*this, powers, sources[i], targets[i]); leaf.frame_bytes() > 0) {
      leaves.push_back(leaf);
    }
  }
  share_out(pool, leaves, cells());
}

void MultiStepPlan::expect_shape(const TensorView& target, DType dtype) const {
  expect_on_host("target", target);
  if (target.dtype != dtype || !(target.shape == batch_)) {
    throw std::invalid_argument("target: expected " + std::string(name_of(dtype)) + " of shape " +
                                to_string(batch_) + ", got " + std::string(name_of(target.dtype)) +
                                " of shape " + to_string(target.shape));
  }
}

template <typename Value, typename Function>
void MultiStepPlan::fill(const TensorView& target, DType dtype, const Function& value) const {
  expect_shape(target, dtype);
  for (const Piece& piece : pieces_) {
    std::byte* cell = cell_of(target, batch_, piece.cells.row, piece.cells.start);
    for (std::int64_t t = 0; t < piece.cells.length;
         ++t, cell += target.strides[target.rank() - 1]) {
      const Value number = value(piece, t);
      std::memcpy(cell, &number, sizeof(number));
    }
  }
}

void MultiStepPlan::steps(const TensorView& target) const {
  fill<std::int64_t>(target, DType::int64, [this](const Piece& piece, std::int64_t t) {
    return piece.collected ? std::min(n_steps_, piece.cells.length - t) : 0;
  });
}

void MultiStepPlan::discounts(double gamma, const TensorView& target) const {
  expect_shape(target, target.dtype);
  const std::vector<double> powers = powers_of(gamma, std::min(n_steps_, longest_) + 1);
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(double));
  const auto run_of = [&](std::int64_t stride) {
    return RunCopy(row_of(target, batch_),
                   ConstTensorView(nullptr, DType::float64, Dims{1}, Dims{stride}, Device{}));
  };
  const RunCopy repeat = run_of(0);
  const RunCopy descend = run_of(-kSize);
  for (const Piece& piece : pieces_) {
    const Segment& cells = piece.cells;
    const std::int64_t tail = piece.collected ? std::min(n_steps_, cells.length) : 0;
    const double& first = powers[static_cast<std::size_t>(tail)];
    const auto* source = reinterpret_cast<const std::byte*>(&first);
    const auto cell = [&](std::int64_t t) {
      return cell_of(target, batch_, cells.row, cells.start + t);
    };
    repeat(cell(0), source, cells.length - tail);
    descend(cell(cells.length - tail), source, tail);
  }
}

void MultiStepPlan::nonterminal(const TensorView& target) const {
  fill<bool>(target, DType::boolean, [](const Piece& piece, std::int64_t t) {
    return piece.collected && t + 1 < piece.cells.length;
  });
}

}  // namespace pycollect::inline PYCOLLECT_ABI
