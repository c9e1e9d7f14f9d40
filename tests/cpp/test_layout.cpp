#include <doctest/doctest.h>

#include <stdexcept>
#include <vector>

#include "pycollect/header.h"
#include "pycollect/layout.h"
#include "refused.h"

using namespace pycollect;

namespace {

Layout sample() {
  return Layout({{{"observation"}, DType::float32, {3}},
                 {{"next", "reward"}, DType::float32, {1}},
                 {{"collector", "traj_ids"}, DType::int64, {}},
                 {{"empty"}, DType::uint8, {0, 4}}});
}

}  // namespace

TEST_CASE("a layout finds its keys") {
  const Layout layout = sample();
  CHECK(layout.size() == 4);
  CHECK(layout.find({"next", "reward"}) == 1);
  CHECK(layout.find({"next"}) == -1);
  CHECK(to_string(layout[1].key) == "next.reward");
  CHECK(layout[0].frame_bytes() == 12);
  CHECK(layout[3].frame_bytes() == 0);
}

TEST_CASE("fingerprints differ by key, type, shape and order") {
  const std::uint64_t base =
      Layout({{{"a"}, DType::float32, {2}}, {{"b"}, DType::int8, {}}}).fingerprint();
  CHECK(base == Layout({{{"a"}, DType::float32, {2}}, {{"b"}, DType::int8, {}}}).fingerprint());
  CHECK(base != Layout({{{"b"}, DType::int8, {}}, {{"a"}, DType::float32, {2}}}).fingerprint());
  CHECK(base != Layout({{{"a"}, DType::float64, {2}}, {{"b"}, DType::int8, {}}}).fingerprint());
  CHECK(base != Layout({{{"a"}, DType::float32, {2, 1}}, {{"b"}, DType::int8, {}}}).fingerprint());
  CHECK(Layout({{{"a", "b"}, DType::int8, {}}}).fingerprint() !=
        Layout({{{"ab"}, DType::int8, {}}}).fingerprint());
}

TEST_CASE("invalid layouts are refused") {
  CHECK_REFUSED(Layout({}), "leaves", std::invalid_argument);
  CHECK_THROWS_AS(Layout({{{}, DType::int8, {}}}), std::invalid_argument);
  CHECK_REFUSED(Layout({{{"a"}, DType::int8, {}}, {{"a"}, DType::int8, {}}}), "leaves",
                std::invalid_argument);
  CHECK_REFUSED(Layout({{{"a", "b"}, DType::int8, {}}, {{"a"}, DType::int8, {}}}), "leaves",
                std::invalid_argument);
  CHECK_THROWS_AS(Layout({{{"a"}, DType::int8, {-1}}}), std::invalid_argument);
  // Three more dimensions would not fit, nor would the strides of an empty frame.
  const std::vector<std::int64_t> ones(Dims::kMaxRank - 2, 1);
  CHECK_REFUSED(Layout({{{"a"}, DType::int8, Dims(std::span(ones))}}), "leaves",
                std::invalid_argument);
  constexpr std::int64_t kLarge = std::int64_t{1} << 40;
  CHECK_THROWS_AS(Layout({{{"a"}, DType::int8, {0, kLarge, kLarge}}}), std::length_error);
}

TEST_CASE("leaves are placed in order, aligned, and inside the slab") {
  for (Order order : {Order::stack, Order::time}) {
    const Placement placement(sample(), {2, 3, 5, order});
    std::vector<std::byte> slab(static_cast<std::size_t>(placement.bytes()));
    std::int64_t end = 2 * placement.header_bytes();
    CHECK(placement.header_bytes() % 64 == 0);
    CHECK(placement.header_bytes() >= RolloutHeader::bytes_for(3));
    for (std::size_t leaf = 0; leaf < placement.layout().size(); ++leaf) {
      CHECK(placement.offset(leaf) % 64 == 0);
      CHECK(placement.offset(leaf) >= end);
      end = placement.offset(leaf) + placement.layout()[leaf].frame_bytes() * 30;
      CHECK(end <= placement.bytes());
    }
    CHECK(placement.bytes() % 64 == 0);
  }
}

TEST_CASE("the view of a leaf is [B, P, T, *frame] in both orders") {
  std::vector<std::byte> slab(100000);
  const Placement stack(sample(), {2, 3, 5, Order::stack});
  const TensorView stacked = stack.view(slab.data(), 0);
  CHECK(stacked.shape == Dims{2, 3, 5, 3});
  CHECK(stacked.is_contiguous());

  const Placement time(sample(), {2, 3, 5, Order::time});
  const TensorView timed = time.view(slab.data(), 0);
  CHECK(timed.shape == Dims{2, 3, 5, 3});
  CHECK(timed.strides == Dims{5 * 12, 10 * 12, 12, 4});  // [P, B, T] in memory
  const TensorView rows = time.rows(slab.data(), 0, 1);
  CHECK(rows.shape == Dims{3, 5, 3});
  CHECK(rows.data == timed.data + 5 * 12);
}

TEST_CASE("invalid geometries are refused") {
  CHECK_REFUSED(Placement(sample(), {1, 0, 5, Order::stack}), "geometry", std::invalid_argument);
  CHECK_THROWS_AS(Placement(sample(), {1LL << 40, 1LL << 20, 8, Order::stack}), std::length_error);
  const Placement placement(sample(), {2, 1, 1, Order::stack});
  CHECK_REFUSED(placement.header_offset(2), "row", std::out_of_range);
  CHECK_REFUSED(placement.header_offset(-1), "row", std::out_of_range);
}

TEST_CASE("the standard layout has all leaves that a recorder writes") {
  const Layout layout =
      standard_layout({{"observation", DType::float32, {4}}}, {{"action", DType::int64, {}}},
                      {.step_count = true, .mask = true});
  for (const char* key :
       {"observation", "next.observation", "action", "done", "next.done", "terminated",
        "next.terminated", "truncated", "next.truncated", "next.reward", "collector.traj_ids",
        "collector.policy_version", "step_count", "next.step_count", "collector.mask"}) {
    INFO(key);
    CHECK(layout.find(key) >= 0);
  }
  CHECK(layout.size() == 15);
  CHECK(standard_layout({{"observation", DType::float32, {4}}}, {}, {.policy_version = false})
            .size() == 10);
  CHECK_THROWS_AS(standard_layout({{"action", DType::float32, {}}}, {{"action", DType::int64, {}}}),
                  std::invalid_argument);
}
