// RolloutHeader: what a rollout says of itself, at the start of its slab.
//
// A header may come from another process, so it is checked against the Layout before any of its
// numbers is used to form a pointer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class Placement;

struct RolloutHeader {
  static constexpr std::uint64_t kMagic = 0x31306c6f63795000ULL;  // "\0Pycol01"

  std::uint64_t magic = kMagic;
  std::uint64_t fingerprint = 0;  // of the Layout
  std::uint64_t bytes = 0;        // of the whole slab
  std::int64_t worker = 0;
  std::int64_t incarnation = 0;  // how many times the worker was replaced
  std::int64_t sequence = 0;     // of the rollout within the incarnation, from 0
  std::int64_t policy_version = 0;
  std::int64_t envs = 0;         // P
  std::int64_t steps = 0;        // T
  std::int64_t frames = 0;       // collected ones, uncollected cells not counted
  std::uint64_t generation = 0;  // of the slab when it was lent for this rollout
  std::uint64_t checksum = 0;    // of all of the above and the lengths
  // P valid lengths (int64) follow.

  static std::int64_t bytes_for(std::int64_t envs);
};
static_assert(std::is_trivially_copyable_v<RolloutHeader>);

// Writes header and valid lengths (one per env) where worker's header of a slab belongs.
void write_header(std::byte* base, const Placement& placement, std::int64_t row,
                  RolloutHeader header, std::span<const std::int64_t> lengths);

// The header in row of a slab of `bytes` bytes, after all of its numbers were checked against the
// placement; throws std::invalid_argument that names the first one that does not fit.
RolloutHeader read_header(std::span<const std::byte> slab, const Placement& placement,
                          std::int64_t row);

// The valid lengths behind that header, one per env, likewise checked: each from 0 to T.
std::vector<std::int64_t> read_lengths(std::span<const std::byte> slab, const Placement& placement,
                                       std::int64_t row);

}  // namespace pycollect::inline PYCOLLECT_ABI
