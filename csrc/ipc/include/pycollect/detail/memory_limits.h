// The amount of memory that this process can still allocate.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

struct MemoryLimit {
  std::int64_t bytes = 0;  // that can still be allocated
  std::string source;      // the limit's name: "MemAvailable", "the memory cgroup", "RLIMIT_AS"
};

// Returns the lowest of several limits: the available memory of the machine, the rest of this
// process's memory cgroups (v1 or v2), and its limits of address space and file size. Check it
// before allocating, because Linux kills a process that exceeds one of the first two. `root` is the
// folder that contains /proc and /sys.
MemoryLimit available_memory(const std::filesystem::path& root = "/");

// Throws std::length_error, with both numbers, if `bytes` exceeds available_memory(). For up to
// 1 MiB it checks only RLIMIT_FSIZE, which is faster.
void check_available(std::int64_t bytes);

}  // namespace pycollect::inline PYCOLLECT_ABI
