// What a Collector is told, and what it tells of its frames.
#pragma once

#include <cstdint>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// When a batch is complete: once all workers are done, or the first.
enum class Ready : std::uint8_t { all, first };

struct CollectorOptions {
  std::int64_t workers = 1;  // W
  std::int64_t envs = 1;     // P, of each worker
  std::int64_t steps = 128;  // T, of each rollout
  std::uint64_t seed = 0;
  Ready ready = Ready::all;
  std::int64_t max_frames_per_traj = 0;  // truncate a trajectory at that length; 0: never
  bool set_truncated = false;            // flag the last frame of every env in every rollout
};

// Frames, counted. In the type that printf has a word for.
struct Ledger {
  long long issued = 0;     // asked for
  long long delivered = 0;  // in batches that next() has returned
  long long in_flight = 0;  // being collected, or waiting to be delivered
  long long lost = 0;       // of rollouts that failed, or that stop() ended
};

}  // namespace pycollect::inline PYCOLLECT_ABI
