// Options of a Collector, and its count of frames.
#pragma once

#include <cstdint>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// When next() returns: after all workers have finished, or after the first one.
enum class Ready : std::uint8_t { all, first };

struct CollectorOptions {
  std::int64_t workers = 1;  // W
  std::int64_t envs = 1;     // P, per worker
  std::int64_t steps = 128;  // T, per rollout
  std::uint64_t seed = 0;
  Ready ready = Ready::all;
  std::int64_t max_frames_per_traj = 0;  // truncate a trajectory at this length; 0: never
  bool set_truncated = false;  // flag the last frame of every environment in every rollout
};

// Numbers of frames, as long long because printf has a format for it.
struct Ledger {
  long long issued = 0;     // requested from workers
  long long delivered = 0;  // in batches that next() has returned
  long long in_flight = 0;  // being collected, or waiting for delivery
  long long lost = 0;       // of rollouts that failed or that stop() ended
};

}  // namespace pycollect::inline PYCOLLECT_ABI
