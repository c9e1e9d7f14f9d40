// TrajectoryIds, compared with a loop over single cells.

#include <stdexcept>

#include "fuzz.h"
#include "pycollect/assemble.h"

using namespace pycollect;
using namespace pycollect::fuzz;

namespace {

constexpr std::int64_t kMostIds = (std::int64_t{1} << 62) - 1;

// Does the work of renumber() cell by cell; returns false if renumber() must refuse the ids.
bool renumbered(TrajectoryIds::State& state, std::int64_t worker, Array& ids) {
  const std::int64_t P = ids.view.shape[0], T = ids.view.shape[1];
  const std::vector<std::int64_t> none(static_cast<std::size_t>(P), -1);
  auto own =
      state.workers.contains(worker) ? state.workers[worker] : TrajectoryIds::Worker{none, none};
  if (own.local.size() != static_cast<std::size_t>(P)) {
    return false;
  }
  std::int64_t next = state.next;
  std::vector<std::int64_t> global;
  for (std::int64_t p = 0; p < P; ++p) {
    auto& local = own.local[static_cast<std::size_t>(p)];
    auto& open = own.global[static_cast<std::size_t>(p)];
    for (std::int64_t t = 0; t < T; ++t) {
      const auto id = load<std::int64_t>(at(ids.view, Dims{p, t}));
      if (id < -1 || id > kMostIds || (id >= 0 && id < local)) {
        return false;
      }
      if (id > local) {
        local = id;
        open = next++;
      }
      global.push_back(id == -1 ? -1 : open);
    }
  }
  state.next = next;
  state.workers[worker] = own;
  for (std::int64_t i = 0; i < P * T; ++i) {
    std::memcpy(at(ids.view, Dims{i / T, i % T}), &global[static_cast<std::size_t>(i)], 8);
  }
  return true;
}

void check_ids(Bytes& in) {
  TrajectoryIds ids;
  if (in.one_in(4)) {
    TrajectoryIds::State state{in.size(), {}};
    state.workers[0] = {{in.size()}, {in.size()}};
    if (throws<std::invalid_argument>([&] { ids = TrajectoryIds(state); })) {
      return;
    }
    EXPECT(ids.state() == state);
  }
  for (int calls = 0; calls < 6 && !in.is_empty(); ++calls) {
    TrajectoryIds::State expected = ids.state();
    if (in.one_in(8)) {
      const std::int64_t count = in.size();
      if (!throws<std::logic_error>([&] { EXPECT(ids.issue(count) == expected.next); })) {
        EXPECT(count >= 0 && count <= kMostIds && ids.next() == expected.next + count);
      }
      continue;
    }
    const std::int64_t worker = in.below(2);
    if (in.one_in(8)) {
      ids.forget(worker);
    }
    expected = ids.state();
    Array rollout(in, DType::int64, Dims{1 + in.below(3), in.below(7)}, Strides::distinct);
    for (std::int64_t p = 0; p < rollout.view.shape[0]; ++p) {
      std::int64_t id = in.one_in(8) ? in.size() : in.below(3);
      for (std::int64_t t = 0; t < rollout.view.shape[1]; ++t) {
        const int kind = in.below(16);
        id = kind == 0 ? in.size() : kind < 4 && id < kMostIds ? id + 1 : id;
        const std::int64_t value = kind == 15 ? -1 : id;
        std::memcpy(at(rollout.view, Dims{p, t}), &value, 8);
      }
    }
    const std::vector<std::byte> before = rollout.memory;
    const bool refused = throws<std::logic_error>([&] { ids.renumber(worker, rollout.view); });
    const std::vector<std::byte> after = rollout.memory;
    std::copy(before.begin(), before.end(), rollout.memory.begin());
    if (refused) {
      EXPECT(after == before && ids.state() == expected);
    }
    if (expected.next < kMostIds) {
      EXPECT(renumbered(expected, worker, rollout) == !refused);
      EXPECT(rollout.memory == after && ids.state() == expected);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes in(data, size);
  check_ids(in);
  return 0;
}
