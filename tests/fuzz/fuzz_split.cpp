// SplitPlan and MultiStepPlan, compared with loops over single cells.

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "fuzz.h"
#include "pycollect/multistep.h"
#include "pycollect/split.h"
#include "pycollect/thread_pool.h"

using namespace pycollect;
using namespace pycollect::fuzz;

namespace {

ThreadPool& pool() {
  static ThreadPool threads(3);
  return threads;
}

// done, ids or mask: values that repeat, with trailing dimensions of one.
std::unique_ptr<Array> signal_of(Bytes& in, DType dtype, Dims shape) {
  if (in.one_in(3)) {
    shape.push_back(1);
  }
  auto signal = std::make_unique<Array>(in, dtype, shape, Strides::any);
  const int rare = in.below(16) + 1;
  std::int64_t id = 0;
  for_each_index(shape, [&](const Dims& index) {
    if (dtype == DType::int64) {
      id = in.one_in(rare) ? in.below(4) - 1 : id;
      std::memcpy(at(signal->view, index), &id, sizeof(id));
    } else {
      *at(signal->view, index) = static_cast<std::byte>(in.one_in(rare) ? in.byte() : 0);
    }
  });
  return signal;
}

struct Signals {
  std::unique_ptr<Array> done, ids, mask;

  static std::optional<ConstTensorView> view(const std::unique_ptr<Array>& signal) {
    return signal ? std::optional<ConstTensorView>(signal->view) : std::nullopt;
  }
  SplitPlan plan(int batch_dims) const { return {view(done), view(ids), view(mask), batch_dims}; }

  bool is_done(const Dims& cell) const { return done && *at(done->view, cell) != std::byte{0}; }
  std::int64_t id(const Dims& cell) const {
    return ids ? load<std::int64_t>(at(ids->view, cell)) : 0;
  }
  bool is_collected(const Dims& cell) const {
    return id(cell) != -1 && (!mask || *at(mask->view, cell) != std::byte{0});
  }
};

// The segment of each cell, or -1; and the cells of each segment.
struct Reference {
  std::vector<std::int64_t> segment_of;
  std::vector<std::vector<Dims>> segments;
  std::size_t longest = 0;
  std::int64_t frames = 0;

  Reference(const Signals& signals, const Dims& batch) {
    const int time = batch.size() - 1;
    for_each_index(batch, [&](const Dims& cell) {
      if (!signals.is_collected(cell)) {
        segment_of.push_back(-1);
        return;
      }
      Dims before = cell;
      before[time] -= 1;
      const bool continues = cell[time] > 0 && signals.is_collected(before) &&
                             !signals.is_done(before) && signals.id(before) == signals.id(cell);
      if (!continues) {
        segments.emplace_back();
      }
      segments.back().push_back(cell);
      segment_of.push_back(static_cast<std::int64_t>(segments.size()) - 1);
      longest = std::max(longest, segments.back().size());
      ++frames;
    });
  }
};

// A target with one more dimension is refused before anything is written.
template <typename Call>
void check_refusal(Bytes& in, const Array& source, Dims shape, const Call& call) {
  shape.push_back(1);
  Array target(in, DType::uint8, shape, Strides::contiguous);
  const std::vector<std::byte> before = target.memory;
  const ConstTensorView sources[] = {source.view};
  const TensorView targets[] = {target.view};
  EXPECT(throws<std::invalid_argument>([&] { call(sources, targets); }));
  EXPECT(target.memory == before);
}

// The address of an element, by the index of its cell and its index within the frame.
const std::byte* element_of(const Array& source, const Dims& cell,
                            std::span<const std::int64_t> frame) {
  return at(source.view, joined(cell, frame));
}

// Whether the padded form of a batch can be compared element by element within seconds.
bool is_quick(const SplitPlan& plan) { return plan.count() * plan.longest() <= (1 << 13); }

void check_split(Bytes& in, const SplitPlan& plan, const Reference& reference,
                 const Array& source) {
  const auto frame = source.view.shape.from(plan.batch().size());
  const bool padded = in.one_in(2) && is_quick(plan);
  const Dims lead = padded ? Dims{plan.count(), plan.longest()} : Dims{plan.frames()};
  const auto gather = [&](std::span<const ConstTensorView> sources,
                          std::span<const TensorView> targets) {
    padded ? plan.padded(pool(), sources, targets) : plan.flat(pool(), sources, targets);
  };
  Array target(in, in.one_in(2) ? source.view.dtype : in.dtype(), joined(lead, frame),
               Strides::distinct);
  const ConstTensorView sources[] = {source.view, source.view};
  Array second(in, source.view.dtype, target.view.shape, Strides::distinct);
  const TensorView targets[] = {target.view, second.view};
  const std::vector<std::byte> before = target.memory, before_second = second.memory;
  gather(sources, targets);
  std::vector<Dims> cells;  // in the order of the flat form
  for (const auto& segment : reference.segments) {
    cells.insert(cells.end(), segment.begin(), segment.end());
  }
  const auto source_of = [&](const Dims& index) -> std::optional<const std::byte*> {
    if (!padded) {
      return element_of(source, cells[static_cast<std::size_t>(index[0])], index.from(1));
    }
    const auto& segment = reference.segments[static_cast<std::size_t>(index[0])];
    const auto t = static_cast<std::size_t>(index[1]);
    return t < segment.size() ? element_of(source, segment[t], index.from(2)) : nullptr;
  };
  check_target(target, before, source.view.dtype, source_of);
  check_target(second, before_second, source.view.dtype, source_of);
  check_refusal(in, source, target.view.shape, gather);
}

void check_padding(Bytes& in, const SplitPlan& plan, const Reference& reference) {
  const std::int64_t value = in.size();
  const std::byte yes{1};
  const auto is_padding = [&](const Dims& index) {
    return static_cast<std::size_t>(index[1]) >=
           reference.segments[static_cast<std::size_t>(index[0])].size();
  };
  Array mask(in, DType::boolean, Dims{plan.count(), plan.longest()}, Strides::distinct);
  std::vector<std::byte> before = mask.memory;
  plan.mask(mask.view);
  check_target(mask, before, DType::boolean, [&](const Dims& index) {
    return std::optional<const std::byte*>(is_padding(index) ? nullptr : &yes);
  });
  Array leaf(in, in.dtype(), joined(mask.view.shape, in.shape(2, 8).from(0)), Strides::distinct);
  before = leaf.memory;
  plan.pad(leaf.view, value);
  check_target(leaf, before, DType::int64, [&](const Dims& index) {
    const auto* address = reinterpret_cast<const std::byte*>(&value);
    return is_padding(index) ? std::optional<const std::byte*>(address) : std::nullopt;
  });
}

// For n-step returns: the last cell of a cell's window, and the number of its steps.
struct Ahead {
  Dims cell;
  std::int64_t steps;
  bool is_last;  // of its segment, or not collected
};

Ahead ahead_of(const Reference& reference, const Dims& batch, const Dims& cell, std::int64_t n) {
  std::int64_t flat = 0;
  for (int i = 0; i < batch.size(); ++i) {
    flat = flat * batch[i] + cell[i];
  }
  const std::int64_t own = reference.segment_of[static_cast<std::size_t>(flat)];
  if (own < 0) {
    return {cell, 0, true};
  }
  const Dims& last = reference.segments[static_cast<std::size_t>(own)].back();
  const int time = batch.size() - 1;
  Ahead ahead{cell, std::min(n, last[time] - cell[time] + 1), cell == last};
  ahead.cell[time] += ahead.steps - 1;
  return ahead;
}

void check_sums(Bytes& in, const MultiStepPlan& plan, const Reference& reference,
                const Array& source, double gamma) {
  const DType dtype = in.one_in(2) ? DType::float64 : DType::float32;
  const int dims = plan.batch().size();
  Array target(in, dtype, source.view.shape, Strides::distinct);
  const ConstTensorView sources[] = {source.view};
  const TensorView targets[] = {target.view};
  plan.sum(pool(), gamma, sources, targets);
  for_each_index(source.view.shape, [&](const Dims& index) {
    const Dims cell(index.from(0).first(static_cast<std::size_t>(dims)));
    const std::int64_t steps = ahead_of(reference, plan.batch(), cell, plan.n_steps()).steps;
    long double sum = 0, size = 0, discount = 1;
    Dims next = index;
    for (std::int64_t k = 0; k < steps; ++k, ++next[dims - 1], discount *= gamma) {
      const Number value = cast(number_at(source.view.dtype, at(source.view, next)),
                                source.view.dtype, DType::float64);
      const long double term = discount * value.real();
      sum += term;
      size += std::fabs(term);
    }
    const long double got = number_at(dtype, at(target.view, index)).real();
    if (!std::isfinite(size)) {
      EXPECT(std::isfinite(sum) || same(got, sum));
    } else if (size < (dtype == DType::float32 ? 1e38L : 1e300L)) {
      const long double digits = dtype == DType::float32 ? 1e-6L : 1e-12L;
      EXPECT(std::fabs(got - sum) <= digits * size + 1e-40L);
    }
  });
}

void check_multistep(Bytes& in, const SplitPlan& split, const Reference& reference,
                     const Array& source) {
  const std::int64_t n = in.one_in(4) ? in.size() : 1 + in.below(12);
  if (n < 1) {
    EXPECT(throws<std::invalid_argument>([&] { MultiStepPlan(split, n); }));
    return;
  }
  const MultiStepPlan plan(split, n);
  const Dims& batch = plan.batch();
  const auto ahead = [&](const Dims& cell) { return ahead_of(reference, batch, cell, n); };
  const auto lead = static_cast<std::size_t>(batch.size());

  Array target(in, in.one_in(2) ? source.view.dtype : in.dtype(), source.view.shape,
               Strides::distinct);
  const ConstTensorView sources[] = {source.view};
  const TensorView targets[] = {target.view};
  const std::vector<std::byte> before = target.memory;
  plan.shift(pool(), sources, targets);
  check_target(target, before, source.view.dtype, [&](const Dims& index) {
    const Dims cell(index.from(0).first(lead));
    return std::optional(element_of(source, ahead(cell).cell, index.from(batch.size())));
  });
  check_refusal(in, source, source.view.shape,
                [&](std::span<const ConstTensorView> from, std::span<const TensorView> to) {
                  plan.shift(pool(), from, to);
                });

  constexpr double kGammas[] = {0, 0.5, 0.9, 1, 1.5};
  const double gamma = kGammas[in.below(5)];
  Array steps(in, DType::int64, batch, Strides::distinct);
  Array discounts(in, DType::float64, batch, Strides::distinct);
  Array nonterminal(in, DType::boolean, batch, Strides::distinct);
  plan.steps(steps.view);
  plan.discounts(gamma, discounts.view);
  plan.nonterminal(nonterminal.view);
  for_each_index(batch, [&](const Dims& cell) {
    const Ahead expected = ahead(cell);
    EXPECT(load<std::int64_t>(at(steps.view, cell)) == expected.steps);
    EXPECT((load<std::uint8_t>(at(nonterminal.view, cell)) == 1) == !expected.is_last);
    const double discount = load<double>(at(discounts.view, cell));
    const double wanted = std::pow(gamma, static_cast<double>(expected.steps));
    EXPECT(discount == wanted || std::fabs(discount - wanted) <= 1e-9 * wanted);  // or infinity
  });
  // The reference takes a term for each step of each element: seconds for the longest batches.
  if (element_count(source.view.shape.from(0)) * std::min(n, split.longest()) <= (1 << 22)) {
    check_sums(in, plan, reference, source, gamma);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes in(data, size);
  Dims batch = in.shape(2, 12);
  const int kind = in.byte();  // segments longer than a chunk of sums have more than 1,024 frames
  for (int axis = 0; kind > 248 && axis < batch.size(); ++axis) {
    batch[axis] = std::min<std::int64_t>(batch[axis], 2);
  }
  batch.push_back(kind == 255 ? 2600 : kind > 248 ? 300 : kind % 20);
  Signals signals;
  const int given = in.below(3);
  signals.done = given != 1 ? signal_of(in, DType::boolean, batch) : nullptr;
  signals.ids = given != 0 ? signal_of(in, DType::int64, batch) : nullptr;
  signals.mask = in.one_in(2) ? signal_of(in, DType::boolean, batch) : nullptr;
  const SplitPlan plan = signals.plan(batch.size());
  const Reference reference(signals, batch);

  EXPECT(plan.batch() == batch);
  EXPECT(plan.count() == static_cast<std::int64_t>(reference.segments.size()));
  EXPECT(plan.frames() == reference.frames);
  EXPECT(plan.longest() == static_cast<std::int64_t>(reference.longest));
  const std::vector<std::int64_t> lengths = plan.lengths();
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    EXPECT(lengths[i] == static_cast<std::int64_t>(reference.segments[i].size()));
    EXPECT(plan.offsets()[i + 1] - plan.offsets()[i] == lengths[i]);
  }
  const Array source(in, in.dtype(), joined(batch, in.shape(2, kind > 248 ? 4 : 12).from(0)),
                     Strides::any);
  check_split(in, plan, reference, source);
  if (is_quick(plan)) {
    check_padding(in, plan, reference);
  }
  check_multistep(in, plan, reference, source);
  return 0;
}
