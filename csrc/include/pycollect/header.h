// RolloutHeader: the description of a rollout, at the start of its slab.
//
// A header may come from another process. It is checked against the Layout before any of its
// numbers is used to compute an address.
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
  std::int64_t incarnation = 0;  // number of earlier replacements of the worker
  std::int64_t sequence = 0;     // of the rollout within the incarnation, from 0
  std::int64_t policy_version = 0;
  std::int64_t envs = 0;         // P
  std::int64_t steps = 0;        // T
  std::int64_t frames = 0;       // collected frames, without uncollected cells
  std::uint64_t generation = 0;  // of the slab, when it was lent for this rollout
  std::uint64_t checksum = 0;    // of all fields above and the lengths
  // Followed by P valid lengths (int64).

  static std::int64_t bytes_for(std::int64_t envs);
};
static_assert(std::is_trivially_copyable_v<RolloutHeader>);

// Writes the header and the valid lengths, one per environment, into `row` of a slab at `base`.
void write_header(std::byte* base, const Placement& placement, std::int64_t row,
                  RolloutHeader header, std::span<const std::int64_t> lengths);

// Returns the header in `row` of a slab, after checking all of its numbers against the placement.
// Throws std::invalid_argument for the first number that does not fit.
RolloutHeader read_header(std::span<const std::byte> slab, const Placement& placement,
                          std::int64_t row);

// Returns the valid lengths after this header, one per environment, from 0 to T. They are checked
// in the same way.
std::vector<std::int64_t> read_lengths(std::span<const std::byte> slab, const Placement& placement,
                                       std::int64_t row);

}  // namespace pycollect::inline PYCOLLECT_ABI
