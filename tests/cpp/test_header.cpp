#include <doctest/doctest.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "pycollect/header.h"
#include "pycollect/layout.h"

using namespace pycollect;

namespace {

struct Fixture {
  Placement placement{Layout({{{"a"}, DType::float32, {3}}}), {2, 3, 5, Order::stack}};
  std::vector<std::byte> slab = std::vector<std::byte>(static_cast<std::size_t>(placement.bytes()));

  void write(std::int64_t row) {
    RolloutHeader header;
    header.worker = 7;
    header.sequence = 2;
    header.policy_version = 11;
    header.frames = 15;
    write_header(slab.data(), placement, row, header, std::vector<std::int64_t>{5, 5, 5});
  }
};

}  // namespace

TEST_CASE("a header is read back") {
  Fixture f;
  f.write(1);
  const RolloutHeader header = read_header(f.slab, f.placement, 1);
  CHECK(header.worker == 7);
  CHECK(header.sequence == 2);
  CHECK(header.policy_version == 11);
  CHECK(header.envs == 3);
  CHECK(header.steps == 5);
  CHECK_THROWS_AS(read_header(f.slab, f.placement, 0), std::invalid_argument);  // not written yet
  CHECK_THROWS_AS(read_header(f.slab, f.placement, 2), std::out_of_range);
}

TEST_CASE("any flipped byte is detected") {
  Fixture f;
  f.write(0);
  const auto bytes = static_cast<std::size_t>(RolloutHeader::bytes_for(3));
  for (std::size_t i = 0; i < bytes; ++i) {
    std::vector<std::byte> slab = f.slab;
    slab[i] ^= std::byte{0x10};
    CHECK_THROWS_AS(read_header(slab, f.placement, 0), std::invalid_argument);
  }
}

TEST_CASE("a slab that is too short is never read") {
  Fixture f;
  f.write(0);
  for (std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, sizeof(RolloutHeader), f.slab.size() - 1}) {
    // A copy of exactly this size, so that AddressSanitizer detects reads past its end.
    const std::vector<std::byte> cut(f.slab.begin(),
                                     f.slab.begin() + static_cast<std::ptrdiff_t>(bytes));
    CHECK_THROWS_AS(read_header(cut, f.placement, 0), std::invalid_argument);
  }
}

TEST_CASE("another placement is refused, naming the first number that differs") {
  Fixture f;
  f.write(0);
  const Placement other(Layout({{{"b"}, DType::float32, {3}}}), {2, 3, 5, Order::stack});
  REQUIRE(other.bytes() == f.placement.bytes());
  try {
    read_header(f.slab, other, 0);
    FAIL("expected an exception");
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find("layout fingerprint") != std::string::npos);
  }
}

TEST_CASE("a header needs one length per env") {
  Fixture f;
  CHECK_THROWS_AS(write_header(f.slab.data(), f.placement, 0, {}, std::vector<std::int64_t>{5, 5}),
                  std::invalid_argument);
}
