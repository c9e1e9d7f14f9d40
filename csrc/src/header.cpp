#include "pycollect/header.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "pycollect/detail/checked.h"
#include "pycollect/layout.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

// FNV-1a over 64-bit words: headers are short, and only accidental corruption must be detected.
std::uint64_t checksum_of(RolloutHeader header, std::span<const std::int64_t> lengths) {
  header.checksum = 0;
  std::uint64_t words[sizeof(RolloutHeader) / sizeof(std::uint64_t)];
  static_assert(sizeof(words) == sizeof(RolloutHeader));
  std::memcpy(words, &header, sizeof(header));
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (std::uint64_t word : words) {
    hash = (hash ^ word) * 0x100000001b3ULL;
  }
  for (std::int64_t length : lengths) {
    hash = (hash ^ static_cast<std::uint64_t>(length)) * 0x100000001b3ULL;
  }
  return hash;
}

template <typename T>
void expect(const char* what, T expected, T actual) {
  if (expected != actual) {
    throw std::invalid_argument(std::string("rollout header: expected ") + what + " " +
                                std::to_string(expected) + ", got " + std::to_string(actual));
  }
}

std::vector<std::int64_t> lengths_at(const std::byte* header, std::int64_t envs) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(envs));
  std::memcpy(lengths.data(), header + sizeof(RolloutHeader), lengths.size() * sizeof(lengths[0]));
  return lengths;
}

}  // namespace

std::int64_t RolloutHeader::bytes_for(std::int64_t envs) {
  return checked_add(static_cast<std::int64_t>(sizeof(RolloutHeader)),
                     checked_mul(envs, static_cast<std::int64_t>(sizeof(std::int64_t))));
}

void write_header(std::byte* base, const Placement& placement, std::int64_t row,
                  RolloutHeader header, std::span<const std::int64_t> lengths) {
  expect("valid lengths for envs", placement.geometry().envs,
         static_cast<std::int64_t>(lengths.size()));
  header.fingerprint = placement.layout().fingerprint();
  header.bytes = static_cast<std::uint64_t>(placement.bytes());
  header.envs = placement.geometry().envs;
  header.steps = placement.geometry().steps;
  header.checksum = checksum_of(header, lengths);
  std::byte* target = base + placement.header_offset(row);
  std::memcpy(target, &header, sizeof(header));
  std::memcpy(target + sizeof(header), lengths.data(), lengths.size_bytes());
}

RolloutHeader read_header(std::span<const std::byte> slab, const Placement& placement,
                          std::int64_t row) {
  expect("a slab of bytes", placement.bytes(), static_cast<std::int64_t>(slab.size()));
  const std::byte* source = slab.data() + placement.header_offset(row);
  RolloutHeader header;
  std::memcpy(&header, source, sizeof(header));
  expect("magic", RolloutHeader::kMagic, header.magic);
  expect("layout fingerprint", placement.layout().fingerprint(), header.fingerprint);
  expect("slab bytes", static_cast<std::uint64_t>(placement.bytes()), header.bytes);
  expect("envs", placement.geometry().envs, header.envs);
  expect("steps", placement.geometry().steps, header.steps);
  const std::vector<std::int64_t> lengths = lengths_at(source, header.envs);
  expect("checksum", checksum_of(header, lengths), header.checksum);
  if (header.frames < 0 || header.frames > header.envs * header.steps) {
    throw std::invalid_argument("rollout header: expected 0 to " +
                                std::to_string(header.envs * header.steps) + " frames, got " +
                                std::to_string(header.frames));
  }
  return header;
}

std::vector<std::int64_t> read_lengths(std::span<const std::byte> slab, const Placement& placement,
                                       std::int64_t row) {
  const RolloutHeader header = read_header(slab, placement, row);
  std::vector<std::int64_t> lengths =
      lengths_at(slab.data() + placement.header_offset(row), header.envs);
  for (std::int64_t length : lengths) {
    if (length < 0 || length > header.steps) {
      throw std::invalid_argument("rollout header: expected valid lengths of 0 to " +
                                  std::to_string(header.steps) + ", got " + std::to_string(length));
    }
  }
  return lengths;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
