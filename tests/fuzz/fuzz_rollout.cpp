// Layouts and placements of any size, rollout headers that another process wrote, and the functions
// that copy whole rollouts.

#include <memory>
#include <stdexcept>

#include "fuzz.h"
#include "pycollect/assemble.h"
#include "pycollect/dlpack.h"
#include "pycollect/header.h"
#include "pycollect/layout.h"
#include "pycollect/thread_pool.h"

using namespace pycollect;
using namespace pycollect::fuzz;

namespace {

__extension__ using Wide = __int128;
constexpr Wide kMost = std::numeric_limits<std::int64_t>::max();

ThreadPool& pool() {
  static ThreadPool threads(3);
  return threads;
}

// --- sizes

std::optional<Wide> product(std::initializer_list<Wide> factors) {
  Wide result = 1;
  for (const Wide factor : factors) {
    result = factor > kMost ? factor : result * factor;
    if (result > kMost) {
      return std::nullopt;
    }
  }
  return result;
}

bool is_accepted(const Leaf& leaf) {
  std::optional<Wide> stride = static_cast<Wide>(item_size(leaf.dtype));
  for (const std::int64_t extent : leaf.shape) {
    stride = stride && extent >= 0 ? product({*stride, std::max<Wide>(extent, 1)}) : std::nullopt;
  }
  return stride && leaf.shape.size() <= Dims::kMaxRank - 3;
}

Wide align(Wide n) { return (n + 63) / 64 * 64; }

// Size of a slab; nothing if it does not fit in 64 bits.
std::optional<Wide> slab_bytes(const Layout& layout, const Geometry& geometry) {
  const auto [B, P, T, order] = geometry;
  const std::optional<Wide> headers =
      product({B, align(static_cast<Wide>(sizeof(RolloutHeader)) + Wide{8} * P)});
  const std::optional<Wide> frames = product({B, P, T});
  if (!headers || !frames) {
    return std::nullopt;
  }
  Wide end = *headers;
  for (const Leaf& leaf : layout.leaves()) {
    const std::optional<Wide> bytes = product({*frames, leaf.frame_bytes()});
    if (!bytes || end + *bytes + 63 > kMost) {
      return std::nullopt;
    }
    end = align(end + *bytes);
  }
  return end;
}

Key key_of(Bytes& in) {
  constexpr const char* kNames[] = {"collector", "traj_ids", "a", "next", ""};
  std::vector<std::string> names;
  for (int i = in.below(4); i > 0; --i) {
    names.emplace_back(kNames[in.below(5)]);
  }
  return Key(std::move(names));
}

Layout any_layout(Bytes& in, bool small) {
  std::vector<Leaf> leaves;
  for (int i = in.below(4) + (small ? 1 : 0); i > 0; --i) {
    Leaf leaf{key_of(in), in.dtype(), small ? in.shape(3, 8) : Dims()};
    for (int axis = small ? 0 : in.below(18); axis > 0; --axis) {
      leaf.shape.push_back(in.one_in(2) ? 1 : in.size());
    }
    if (small) {  // always an accepted key
      leaf.key = i == 2 ? Key("collector", "traj_ids") : Key("leaf", std::to_string(i));
    }
    leaves.push_back(std::move(leaf));
  }
  const bool fits = std::all_of(leaves.begin(), leaves.end(), is_accepted);
  Layout layout(std::move(leaves));
  EXPECT(fits);
  return layout;
}

void check_dlpack(const Placement& placement) {
  const auto memory =
      std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(placement.bytes()));
  for (std::size_t leaf = 0; leaf < placement.layout().size(); ++leaf) {
    const TensorView view = placement.view(memory->data(), leaf);
    const std::shared_ptr<const void> lease(memory, memory->data());
    dlpack::Managed* managed = to_dlpack(lease, view);
    const dlpack::Tensor& tensor = managed->tensor;
    EXPECT(tensor.ndim == view.rank() && tensor.data == view.data);
    for (int i = 0; i < tensor.ndim; ++i) {
      EXPECT(tensor.shape[i] == view.shape[i]);
    }
    if (view.count() > 0) {  // without elements, the strides may be of any size
      std::int64_t last = 0;
      for (int i = 0; i < tensor.ndim; ++i) {
        last += (tensor.shape[i] - 1) * tensor.strides[i] * (tensor.dtype.bits / 8);
      }
      const std::int64_t begin = view.data - memory->data();
      EXPECT(begin >= 0 && begin + last + tensor.dtype.bits / 8 <= placement.bytes());
    }
    EXPECT(memory.use_count() == 3);
    managed->deleter(managed);
    EXPECT(memory.use_count() == 2);
    dlpack::ManagedVersioned* versioned = to_dlpack_versioned(lease, view);
    versioned->deleter(versioned);
    EXPECT(memory.use_count() == 2);
  }
}

void check_sizes(Bytes& in) {
  std::optional<Layout> layout;
  if (throws<std::logic_error>([&] { layout = any_layout(in, in.one_in(4)); })) {
    return;
  }
  const Geometry geometry{in.size(), in.size(), in.size(),
                          in.one_in(2) ? Order::stack : Order::time};
  const bool positive = geometry.workers > 0 && geometry.envs > 0 && geometry.steps > 0;
  const std::optional<Wide> bytes = positive ? slab_bytes(*layout, geometry) : std::nullopt;
  std::optional<Placement> placement;
  const bool refused = throws<std::logic_error>([&] { placement.emplace(*layout, geometry); });
  EXPECT(refused == !bytes);
  if (placement) {
    EXPECT(placement->bytes() == *bytes);
    std::vector<std::byte> none(static_cast<std::size_t>(in.below(100)));
    EXPECT(throws<std::invalid_argument>([&] { read_header(none, *placement, 0); }));
    if (*bytes < (1 << 16)) {
      check_dlpack(*placement);
    }
  }
}

// --- rollouts

struct Block {
  Placement placement;
  std::vector<std::byte> memory;

  Block(Bytes& in, const Layout& layout, const Geometry& geometry)
      : placement(layout, geometry), memory(static_cast<std::size_t>(placement.bytes())) {
    in.fill(memory);
  }
  // Offset of a frame, by its definition.
  std::size_t offset(std::size_t leaf, std::int64_t w, std::int64_t p, std::int64_t t) const {
    const auto [B, P, T, order] = placement.geometry();
    const std::int64_t row = order == Order::stack ? w * P + p : p * B + w;
    return static_cast<std::size_t>(placement.offset(leaf) +
                                    (row * T + t) * placement.layout()[leaf].frame_bytes());
  }
};

Geometry small_geometry(Bytes& in) {
  return {1 + in.below(3), 1 + in.below(3), 1 + in.below(5),
          in.one_in(2) ? Order::stack : Order::time};
}

// Calls visit(leaf, p, t) for each frame of a row of P environments and T steps.
template <typename Visit>
void for_each_frame(const Layout& layout, std::int64_t P, std::int64_t T, const Visit& visit) {
  for (std::size_t leaf = 0; leaf < layout.size(); ++leaf) {
    for (std::int64_t p = 0; p < P; ++p) {
      for (std::int64_t t = 0; t < T; ++t) {
        visit(leaf, p, t);
      }
    }
  }
}

std::uint64_t checksum_of(RolloutHeader header, const std::vector<std::int64_t>& lengths) {
  header.checksum = 0;
  std::vector<std::uint64_t> words(sizeof(header) / 8);
  std::memcpy(words.data(), &header, sizeof(header));
  words.insert(words.end(), lengths.begin(), lengths.end());
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const std::uint64_t word : words) {
    hash = (hash ^ word) * 0x100000001b3ULL;
  }
  return hash;
}

struct HeaderOf {
  RolloutHeader header;
  std::vector<std::int64_t> lengths;

  HeaderOf(const Block& block, std::int64_t worker)
      : lengths(static_cast<std::size_t>(block.placement.geometry().envs)) {
    const std::byte* address = block.memory.data() + block.placement.header_offset(worker);
    std::memcpy(&header, address, sizeof(header));
    std::memcpy(lengths.data(), address + sizeof(header), lengths.size() * 8);
  }
  void write(Block& block, std::int64_t worker) const {
    std::byte* address = block.memory.data() + block.placement.header_offset(worker);
    std::memcpy(address, &header, sizeof(header));
    std::memcpy(address + sizeof(header), lengths.data(), lengths.size() * 8);
  }
  bool is_accepted(const Placement& placement) const {
    const auto [B, P, T, order] = placement.geometry();
    return header.magic == RolloutHeader::kMagic &&
           header.fingerprint == placement.layout().fingerprint() &&
           header.bytes == static_cast<std::uint64_t>(placement.bytes()) && header.envs == P &&
           header.steps == T && header.checksum == checksum_of(header, lengths) &&
           header.frames >= 0 && header.frames <= P * T;
  }
  bool fits(const Placement& placement) const {
    return is_accepted(placement) &&
           std::all_of(lengths.begin(), lengths.end(), [&](std::int64_t length) {
             return length >= 0 && length <= placement.geometry().steps;
           });
  }
};

// A block whose headers are valid, except for bytes that another process may have changed.
Block rollouts_of(Bytes& in, const Layout& layout, const Geometry& geometry) {
  Block block(in, layout, geometry);
  for (std::int64_t worker = 0; worker < geometry.workers; ++worker) {
    RolloutHeader header;
    header.worker = in.byte();
    header.policy_version = in.byte();
    header.frames = in.byte() % (geometry.envs * geometry.steps + 1);
    const auto most = static_cast<int>(geometry.steps) + 1;
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(geometry.envs), in.below(most));
    if (in.one_in(4)) {
      lengths.back() = in.below(most);
    }
    write_header(block.memory.data(), block.placement, worker, header, lengths);
    if (in.one_in(4)) {
      HeaderOf changed(block, worker);
      if (in.one_in(2)) {
        changed.lengths[0] = in.size();
      } else {
        const std::int64_t number = in.size();
        std::memcpy(reinterpret_cast<std::byte*>(&changed.header) + 8 * in.below(12), &number, 8);
      }
      if (in.below(4) != 0) {
        changed.header.checksum = checksum_of(changed.header, changed.lengths);
      }
      changed.write(block, worker);
    }
  }
  return block;
}

// Returns whether all headers fit; checks that read_header() and read_lengths() agree.
bool check_headers(const Block& block) {
  bool all = true;
  for (std::int64_t worker = 0; worker < block.placement.geometry().workers; ++worker) {
    const HeaderOf own(block, worker);
    EXPECT(throws<std::invalid_argument>([&] {
             read_header(block.memory, block.placement, worker);
           }) != own.is_accepted(block.placement));
    EXPECT(throws<std::invalid_argument>([&] {
             EXPECT(read_lengths(block.memory, block.placement, worker) == own.lengths);
           }) != own.fits(block.placement));
    all = all && own.fits(block.placement);
  }
  return all;
}

// Checks a row that was written: its header, the frames in `expected`, and that nothing else
// changed.
void check_row(const Block& batch, std::vector<std::byte> expected, std::int64_t row,
               const RolloutHeader& returned, const std::vector<std::int64_t>& lengths) {
  const HeaderOf written(batch, row);
  EXPECT(written.fits(batch.placement));
  EXPECT(written.lengths == lengths);
  EXPECT(std::memcmp(&written.header, &returned, sizeof(returned)) == 0);
  Block copy = batch;
  copy.memory = std::move(expected);
  written.write(copy, row);
  EXPECT(copy.memory == batch.memory);
}

void check_place(Bytes& in, const Layout& layout) {
  const Geometry to = small_geometry(in);
  Geometry from{1, to.envs, 1 + in.below(static_cast<int>(to.steps)), Order::stack};
  if (in.one_in(8)) {
    from = small_geometry(in);
  }
  const Block rollout = rollouts_of(in, layout, from);
  Block batch(in, in.one_in(8) ? any_layout(in, true) : layout, to);
  const std::int64_t row = in.one_in(8) ? in.size() : in.byte() % to.workers;
  const std::size_t cut = in.one_in(8) ? in.byte() : 0;
  const std::span<const std::byte> bytes(rollout.memory.data(),
                                         rollout.memory.size() - std::min(cut, std::size_t{64}));
  const bool fits = check_headers(rollout) && cut == 0 && row >= 0 && row < to.workers &&
                    batch.placement.layout().fingerprint() == layout.fingerprint() &&
                    from.workers == 1 && from.envs == to.envs && from.steps <= to.steps;
  std::vector<std::byte> expected = batch.memory;
  RolloutHeader header;
  const bool refused = throws<std::logic_error>([&] {
    header =
        place_rollout(pool(), batch.memory.data(), batch.placement, row, bytes, rollout.placement);
  });
  EXPECT(refused == !fits);
  if (refused) {
    EXPECT(batch.memory == expected);
    return;
  }
  const HeaderOf own(rollout, 0);
  EXPECT(header.worker == own.header.worker && header.frames == own.header.frames);
  for_each_frame(layout, to.envs, to.steps, [&](std::size_t leaf, std::int64_t p, std::int64_t t) {
    const Leaf& form = layout[leaf];
    const auto size = static_cast<std::size_t>(form.frame_bytes());
    std::byte* target = expected.data() + batch.offset(leaf, row, p, t);
    if (t < from.steps) {
      std::copy_n(rollout.memory.data() + rollout.offset(leaf, 0, p, t), size, target);
    } else if (form.key == Key("collector", "traj_ids")) {
      const std::byte* written = batch.memory.data() + batch.offset(leaf, row, p, t);
      const std::int64_t none = -1;
      for (std::size_t at = 0; at < size; at += item_size(form.dtype)) {
        EXPECT(is_cast(form.dtype, written + at, DType::int64,
                       reinterpret_cast<const std::byte*>(&none)));
      }
      std::copy_n(written, size, target);
    } else {
      std::fill_n(target, size, std::byte{0});
    }
  });
  check_row(batch, expected, row, header, own.lengths);
}

void check_join(Bytes& in, const Layout& layout) {
  const Geometry from = small_geometry(in);
  const bool as_envs = in.one_in(2);
  Geometry to{1 + in.below(3), as_envs ? from.workers * from.envs : from.envs,
              as_envs ? from.steps : from.workers * from.steps,
              in.one_in(2) ? Order::stack : Order::time};
  if (in.one_in(8)) {
    to = small_geometry(in);
  }
  const Block source = rollouts_of(in, layout, from);
  Block batch(in, layout, to);
  const std::int64_t row = in.byte() % to.workers;
  const bool valid = check_headers(source);
  const bool either = from.workers == 1 || from.envs == 1;
  const bool envs = to.steps == from.steps && to.envs == from.workers * from.envs &&
                    (either || from.order == Order::stack);
  const bool time = to.envs == from.envs && to.steps == from.workers * from.steps &&
                    (either || from.order == Order::time);
  std::vector<std::byte> expected = batch.memory;
  RolloutHeader header;
  header.worker = in.byte();
  const bool refused = throws<std::logic_error>([&] {
    header = join_rollouts(pool(), batch.memory.data(), batch.placement, row, source.memory,
                           source.placement, header);
  });
  EXPECT(refused == !(valid && (envs || time)));
  if (refused) {
    EXPECT(batch.memory == expected);
    return;
  }
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(to.envs));
  std::int64_t frames = 0, oldest = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t w = 0; w < from.workers; ++w) {
    const HeaderOf own(source, w);
    frames += own.header.frames;
    oldest = std::min(oldest, own.header.policy_version);
    for (std::int64_t p = 0; p < from.envs; ++p) {
      lengths[static_cast<std::size_t>(envs ? w * from.envs + p : p)] +=
          own.lengths[static_cast<std::size_t>(p)];
    }
    for_each_frame(
        layout, from.envs, from.steps, [&](std::size_t leaf, std::int64_t p, std::int64_t t) {
          const std::size_t target = envs ? batch.offset(leaf, row, w * from.envs + p, t)
                                          : batch.offset(leaf, row, p, w * from.steps + t);
          std::copy_n(source.memory.data() + source.offset(leaf, w, p, t),
                      static_cast<std::size_t>(layout[leaf].frame_bytes()),
                      expected.data() + target);
        });
  }
  EXPECT(header.frames == frames && header.policy_version == oldest);
  check_row(batch, expected, row, header, lengths);
}

void check_compact(Bytes& in, const Layout& layout) {
  const Geometry from = small_geometry(in);
  const Block batch = rollouts_of(in, layout, from);
  bool fits = check_headers(batch);
  std::int64_t sum = 0;
  std::vector<std::int64_t> ends;
  for (std::int64_t w = 0; fits && w < from.workers; ++w) {
    const std::vector<std::int64_t> lengths = HeaderOf(batch, w).lengths;
    fits = std::count(lengths.begin(), lengths.end(), lengths[0]) == from.envs;
    ends.push_back(lengths[0]);
    sum += lengths[0];
  }
  const bool other = in.one_in(8);
  Block joined(in, layout, {1, from.envs, std::max<std::int64_t>(sum, 1) + other, Order::stack});
  std::vector<std::byte> expected = joined.memory;
  const bool refused = throws<std::invalid_argument>([&] {
    compact(pool(), joined.memory.data(), joined.placement, batch.memory, batch.placement);
  });
  EXPECT(refused == !(fits && sum > 0 && !other));
  std::int64_t begin = 0;
  for (std::size_t w = 0; w < ends.size() && !refused; begin += ends[w++]) {
    for_each_frame(
        layout, from.envs, ends[w], [&](std::size_t leaf, std::int64_t p, std::int64_t t) {
          std::copy_n(batch.memory.data() + batch.offset(leaf, static_cast<std::int64_t>(w), p, t),
                      static_cast<std::size_t>(layout[leaf].frame_bytes()),
                      expected.data() + joined.offset(leaf, 0, p, begin + t));
        });
  }
  EXPECT(joined.memory == expected);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes in(data, size);
  switch (in.below(4)) {
    case 0:
      check_sizes(in);
      break;
    case 1:
      check_place(in, any_layout(in, true));
      break;
    case 2:
      check_join(in, any_layout(in, true));
      break;
    default:
      check_compact(in, any_layout(in, true));
  }
  return 0;
}
