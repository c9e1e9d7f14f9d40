// How much memory this process can still take before something stronger than it says no.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

struct MemoryLimit {
  std::int64_t bytes = 0;  // that can still be taken
  std::string source;      // whose limit that is: "MemAvailable", "the memory cgroup", "RLIMIT_AS"
};

// The least of: what the machine has available, what the memory cgroups (v1 or v2) of this process
// leave, and its limits of address space and file size. Linux kills whoever takes more than the
// first two, so ask before. `root` is where /proc and /sys are looked for.
MemoryLimit available_memory(const std::filesystem::path& root = "/");

// Throws std::length_error, with both numbers, if `bytes` are more than that.
void check_available(std::int64_t bytes);

}  // namespace pycollect::inline PYCOLLECT_ABI
