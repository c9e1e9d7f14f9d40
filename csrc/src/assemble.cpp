#include "pycollect/assemble.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "pycollect/copy.h"
#include "pycollect/thread_pool.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

const Key kTrajectoryIds{"collector", "traj_ids"};

// The largest trajectory id: sums and differences of two of them fit in 64 bits.
constexpr std::int64_t kMostIds = (std::int64_t{1} << 62) - 1;

void check_row(const Placement& batch, std::int64_t row, const Placement& rollout) {
  const std::int64_t workers = batch.geometry().workers;
  if (row < 0 || row >= workers) {
    throw std::out_of_range("row: expected 0 to " + std::to_string(workers - 1) + ", got " +
                            std::to_string(row));
  }
  if (batch.layout().fingerprint() != rollout.layout().fingerprint()) {
    throw std::invalid_argument("rollout: expected the layout of the batch, got a different one");
  }
}

void check_geometry(const Placement& batch, std::int64_t row, const Placement& rollout) {
  check_row(batch, row, rollout);
  const Geometry& to = batch.geometry();
  const Geometry& from = rollout.geometry();
  if (from.workers != 1 || from.envs != to.envs || from.steps > to.steps) {
    throw std::invalid_argument("rollout: expected workers, envs and steps " +
                                to_string(Dims{1, to.envs, to.steps}) + " (or fewer steps), got " +
                                to_string(Dims{from.workers, from.envs, from.steps}));
  }
}

// Steps [begin, end) of a view [P, T, ...].
TensorView steps(TensorView view, std::int64_t begin, std::int64_t end) {
  view.data += begin * view.strides[1];
  view.shape[1] = end - begin;
  return view;
}

// Number of steps in the rollout of each row. Throws if the environments of a row differ.
std::vector<std::int64_t> common_lengths(std::span<const std::byte> slab, const Placement& batch) {
  std::vector<std::int64_t> ends;
  for (std::int64_t row = 0; row < batch.geometry().workers; ++row) {
    const std::vector<std::int64_t> lengths = read_lengths(slab, batch, row);
    if (std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) !=
        lengths.end()) {
      throw std::invalid_argument("slab: expected equal valid lengths for all envs of row " +
                                  std::to_string(row) + ", got different ones");
    }
    ends.push_back(lengths.front());
  }
  return ends;
}

// Returns true if the workers become environments of one row, false if their rollouts follow each
// other in time. Throws std::invalid_argument if the memory order allows neither.
bool become_envs(const Geometry& from, const Geometry& to) {
  const bool either = from.workers == 1 || from.envs == 1;  // both orders have the same bytes
  if (to.steps == from.steps && to.envs == from.workers * from.envs &&
      (either || from.order == Order::stack)) {
    return true;
  }
  if (to.envs == from.envs && to.steps == from.workers * from.steps &&
      (either || from.order == Order::time)) {
    return false;
  }
  throw std::invalid_argument("slab: expected workers, envs and steps that make up " +
                              to_string(Dims{to.envs, to.steps}) + ", got " +
                              to_string(Dims{from.workers, from.envs, from.steps}));
}

void fill(const TensorView& view, std::int64_t value) {
  ConstTensorView source = ConstTensorView::contiguous(&value, DType::int64, view.shape);
  for (int i = 0; i < source.rank(); ++i) {
    source.strides[i] = 0;
  }
  copy(view, source);
}

void check_ids(const TensorView& ids) {
  if (ids.dtype != DType::int64 || ids.rank() != 2 || ids.device.kind != DeviceKind::cpu) {
    throw std::invalid_argument("ids: expected int64 of shape [P, T] in host memory, got " +
                                std::string(name_of(ids.dtype)) + " of shape " +
                                to_string(ids.shape));
  }
}

// The ids of one environment, at a fixed stride in bytes. They need no alignment.
class IdRow {
 public:
  IdRow(const TensorView& ids, std::int64_t env)
      : data_(ids.data + env * ids.strides[0]), stride_(ids.strides[1]), steps_(ids.shape[1]) {}

  std::int64_t operator[](std::int64_t t) const { return load(t, stride_); }

  // The end of the run of equal ids that begins at t.
  std::int64_t run_end(std::int64_t t) const {
    const std::int64_t id = (*this)[t];
    do {
      ++t;
    } while (t < steps_ && (*this)[t] == id);
    return t;
  }

  // Whether no id is -1 and each one equals its predecessor or is one larger. A recorder writes
  // such ids if all cells are collected.
  bool counts() const { return stride_ == kBytes ? counts_by(kBytes) : counts_by(stride_); }

  void add(std::int64_t begin, std::int64_t end, std::int64_t number) const {
    if (number != 0) {  // always 0 if the run has a single environment
      stride_ == kBytes ? add_by(kBytes, begin, end, number) : add_by(stride_, begin, end, number);
    }
  }

 private:
  static constexpr auto kBytes = static_cast<std::int64_t>(sizeof(std::int64_t));

  std::int64_t load(std::int64_t t, std::int64_t stride) const {
    std::int64_t id = 0;
    std::memcpy(&id, data_ + t * stride, sizeof(id));
    return id;
  }

  // Compilers vectorize these functions if the stride is known, because they do not branch.
  [[gnu::always_inline]] bool counts_by(std::int64_t stride) const {
    std::uint64_t differences = 0;
    for (std::int64_t t = 1; t < steps_; ++t) {
      differences |= static_cast<std::uint64_t>(load(t, stride)) -
                     static_cast<std::uint64_t>(load(t - 1, stride));
    }
    return differences <= 1 && steps_ > 0 && load(0, stride) >= 0;
  }
  [[gnu::always_inline]] void add_by(std::int64_t stride, std::int64_t begin, std::int64_t end,
                                     std::int64_t number) const {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t sum = load(t, stride) + number;
      std::memcpy(data_ + t * stride, &sum, sizeof(sum));
    }
  }

  std::byte* data_;
  std::int64_t stride_;
  std::int64_t steps_;
};

// Steps [begin, end) of an environment. Their ids count from `first` to `last`.
struct IdRun {
  std::int64_t env;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t first;
  std::int64_t last;
};

// The runs of collected cells, by environment, then by time. In each environment, the ids that are
// not -1 must not decrease, and must not begin below the id of its open trajectory.
std::vector<IdRun> runs_of(const TensorView& ids, std::span<const std::int64_t> open,
                           std::int64_t worker, TrajectoryIds::Known known) {
  std::vector<IdRun> runs;
  runs.reserve(open.size());
  const std::int64_t steps = ids.shape[1];
  for (std::int64_t env = 0; steps > 0 && env < ids.shape[0]; ++env) {
    const IdRow row(ids, env);
    const bool counts = known == TrajectoryIds::Known::counting || row.counts();
    std::int64_t last = open[static_cast<std::size_t>(env)];
    for (std::int64_t t = 0, end = 0; t < steps; t = end) {
      const std::int64_t id = row[t];
      end = counts ? steps : row.run_end(t);
      if (id == -1) {
        continue;
      }
      if (id < 0 || id < last || std::max(id, row[end - 1]) > kMostIds) {
        throw std::invalid_argument(
            "ids: expected -1, or at least " + std::to_string(last < 0 ? 0 : last) +
            " and below 2^62 in worker " + std::to_string(worker) + ", env " + std::to_string(env) +
            ", step " + std::to_string(t) + ", got " + std::to_string(id));
      }
      last = row[end - 1];
      runs.push_back({env, t, end, id, last});
    }
  }
  return runs;
}

void check_state(const TrajectoryIds::State& state) {
  for (const auto& [id, worker] : state.workers) {
    bool fits = worker.local.size() == worker.global.size();
    for (std::size_t env = 0; fits && env < worker.local.size(); ++env) {
      fits = worker.local[env] >= -1 && worker.global[env] >= -1 &&
             worker.global[env] < state.next &&
             (worker.local[env] == -1) == (worker.global[env] == -1);
    }
    if (!fits) {
      throw std::invalid_argument(
          "state: expected equally many local and global ids, all >= -1, and global "
          "ids below " +
          std::to_string(state.next) + ", got other values in worker " + std::to_string(id));
    }
  }
  if (state.next < 0 || state.next > kMostIds) {
    throw std::invalid_argument("state: expected next >= 0 and below 2^62, got " +
                                std::to_string(state.next));
  }
}

}  // namespace

RolloutHeader place_rollout(ThreadPool& pool, std::byte* base, const Placement& batch,
                            std::int64_t row, std::span<const std::byte> rollout,
                            const Placement& placement) {
  check_geometry(batch, row, placement);
  const RolloutHeader header = read_header(rollout, placement, 0);
  const std::vector<std::int64_t> lengths = read_lengths(rollout, placement, 0);

  const std::int64_t valid = placement.geometry().steps;
  const std::int64_t whole = batch.geometry().steps;
  const Stores stores = stores_for(batch.bytes());
  // Views need mutable memory; this one is only read.
  auto* source = const_cast<std::byte*>(rollout.data());
  for (std::size_t leaf = 0; leaf < batch.layout().size(); ++leaf) {
    const TensorView target = batch.rows(base, leaf, row);
    parallel_copy(pool, steps(target, 0, valid), placement.rows(source, leaf, 0), stores);
    if (valid < whole) {
      const TensorView padding = steps(target, valid, whole);
      if (batch.layout()[leaf].key == kTrajectoryIds) {
        fill(padding, -1);
      } else {
        zero(padding);
      }
    }
  }
  write_header(base, batch, row, header, lengths);
  return read_header({base, static_cast<std::size_t>(batch.bytes())}, batch, row);
}

RolloutHeader join_rollouts(ThreadPool& pool, std::byte* base, const Placement& batch,
                            std::int64_t row, std::span<const std::byte> slab,
                            const Placement& placement, RolloutHeader header) {
  check_row(batch, row, placement);
  const Geometry& from = placement.geometry();
  const Geometry& to = batch.geometry();
  const bool as_envs = become_envs(from, to);
  std::vector<std::int64_t> lengths(as_envs ? 0 : static_cast<std::size_t>(to.envs), 0);
  header.frames = 0;
  for (std::int64_t worker = 0; worker < from.workers; ++worker) {
    const RolloutHeader own = read_header(slab, placement, worker);
    const std::vector<std::int64_t> ends = read_lengths(slab, placement, worker);
    header.frames += own.frames;
    header.policy_version =
        worker == 0 ? own.policy_version : std::min(header.policy_version, own.policy_version);
    if (as_envs) {
      lengths.insert(lengths.end(), ends.begin(), ends.end());
    } else {
      std::transform(ends.begin(), ends.end(), lengths.begin(), lengths.begin(), std::plus<>());
    }
  }
  auto* source = const_cast<std::byte*>(slab.data());  // only read
  for (std::size_t leaf = 0; leaf < batch.layout().size(); ++leaf) {
    const TensorView target = batch.rows(base, leaf, row);
    parallel_copy(
        pool, target,
        TensorView::contiguous(source + placement.offset(leaf), target.dtype, target.shape),
        stores_for(batch.bytes()));
  }
  write_header(base, batch, row, header, lengths);
  return read_header({base, static_cast<std::size_t>(batch.bytes())}, batch, row);
}

void compact(ThreadPool& pool, std::byte* target, const Placement& joined,
             std::span<const std::byte> slab, const Placement& batch) {
  const std::vector<std::int64_t> ends = common_lengths(slab, batch);
  const std::int64_t sum = std::accumulate(ends.begin(), ends.end(), std::int64_t{0});
  const Geometry expected{1, batch.geometry().envs, sum, joined.geometry().order};
  if (joined.layout().fingerprint() != batch.layout().fingerprint() ||
      !(joined.geometry() == expected)) {
    throw std::invalid_argument("target: expected the batch's layout and workers, envs and steps " +
                                to_string(Dims{1, expected.envs, sum}) + ", got " +
                                to_string(Dims{joined.geometry().workers, joined.geometry().envs,
                                               joined.geometry().steps}) +
                                " or another layout");
  }
  auto* source = const_cast<std::byte*>(slab.data());  // only read
  for (std::size_t leaf = 0; leaf < batch.layout().size(); ++leaf) {
    const TensorView to = joined.rows(target, leaf, 0);
    std::int64_t begin = 0;
    for (std::size_t row = 0; row < ends.size(); ++row) {
      const auto worker = static_cast<std::int64_t>(row);
      parallel_copy(pool, steps(to, begin, begin + ends[row]),
                    steps(batch.rows(source, leaf, worker), 0, ends[row]),
                    stores_for(joined.bytes()));
      begin += ends[row];
    }
  }
}

std::int64_t TrajectoryIds::issue(std::int64_t count) {
  if (count < 0 || count > kMostIds - state_.next) {
    throw std::invalid_argument("count: expected at least 0, and ids below 2^62, got " +
                                std::to_string(count));
  }
  return std::exchange(state_.next, state_.next + count);
}

TrajectoryIds::TrajectoryIds(State state) : state_(std::move(state)) { check_state(state_); }

void TrajectoryIds::renumber(std::int64_t worker, const TensorView& ids, Known known) {
  check_ids(ids);
  const auto envs = static_cast<std::size_t>(ids.shape[0]);
  const auto found = state_.workers.find(worker);
  const bool is_new = found == state_.workers.end();
  const std::vector<std::int64_t> none(is_new ? envs : 0, -1);
  const std::vector<std::int64_t>& had = is_new ? none : found->second.local;
  if (had.size() != envs) {
    throw std::invalid_argument("ids: expected " + std::to_string(had.size()) +
                                " envs, as before in worker " + std::to_string(worker) + ", got " +
                                std::to_string(envs));
  }
  const std::vector<IdRun> runs = runs_of(ids, had, worker, known);
  Worker& open =
      is_new ? state_.workers.emplace(worker, Worker{none, none}).first->second : found->second;
  for (const IdRun& run : runs) {
    const auto env = static_cast<std::size_t>(run.env);
    const IdRow row(ids, run.env);
    std::int64_t begin = run.begin, first = run.first;
    if (first == open.local[env]) {  // the open trajectory continues
      begin = run.first == run.last ? run.end : row.run_end(begin);
      row.add(run.begin, begin, open.global[env] - open.local[env]);
      ++first;
    }
    if (begin < run.end) {
      row.add(begin, run.end, state_.next - first);
      open.local[env] = run.last;
      open.global[env] = state_.next + (run.last - first);
      state_.next = open.global[env] + 1;
    }
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
