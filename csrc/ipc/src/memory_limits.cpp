#include "pycollect/detail/memory_limits.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

namespace fs = std::filesystem;

// The number after `name` in a file of lines "name number" or "name: number kB". Without a name,
// the first number of the file. Nothing if there is no number, as for "max".
std::optional<std::int64_t> number_in(const fs::path& path, std::string_view name = {}) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string first;
    if (!name.empty() && !(words >> first && first == name)) {
      continue;
    }
    std::int64_t number = 0;
    if (words >> number) {
      return number;
    }
    return std::nullopt;
  }
  return std::nullopt;
}

// Names of the files with the limit and the usage of a memory cgroup.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* inactive;  // in memory.stat: file pages, which the kernel can reclaim
  const char* active;
};
constexpr CgroupFiles kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                          "total_active_file"};
constexpr CgroupFiles kV2{"memory.max", "memory.current", "inactive_file", "active_file"};

// The memory left in a cgroup and all its ancestors, up to the mount point.
std::optional<std::int64_t> left_in(const fs::path& mount, const std::string& cgroup,
                                    const CgroupFiles& files) {
  std::optional<std::int64_t> least;
  // In a container, the path may belong to the host; the container's own limits are then at the
  // mount point.
  for (fs::path path = fs::path(cgroup).relative_path(); true; path = path.parent_path()) {
    const fs::path folder = mount / path;
    const auto limit = number_in(folder / files.limit);
    const auto usage = number_in(folder / files.usage);
    if (limit && usage) {
      const std::int64_t cache = number_in(folder / "memory.stat", files.inactive).value_or(0) +
                                 number_in(folder / "memory.stat", files.active).value_or(0);
      const std::int64_t left =
          std::max<std::int64_t>(*limit - std::max<std::int64_t>(*usage - cache, 0), 0);
      least = std::min(least.value_or(left), left);
    }
    if (path.empty()) {
      return least;
    }
  }
}

std::optional<std::int64_t> left_in_cgroups(const fs::path& root) {
  std::optional<std::int64_t> least;
  std::ifstream file(root / "proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {  // "number:controllers:path"
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    std::string controllers(",");
    controllers.append(line, first + 1, second - first - 1).append(",");
    const std::string path = line.substr(second + 1);
    std::optional<std::int64_t> left;
    if (controllers == ",,") {
      left = left_in(root / "sys/fs/cgroup", path, kV2);
    } else if (controllers.find(",memory,") != std::string::npos) {
      left = left_in(root / "sys/fs/cgroup/memory", path, kV1);
    }
    if (left) {
      least = std::min(least.value_or(*left), *left);
    }
  }
  return least;
}

std::optional<std::int64_t> limit_of(decltype(RLIMIT_AS) resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  return static_cast<std::int64_t>(
      std::min<rlim_t>(limit.rlim_cur, std::numeric_limits<std::int64_t>::max()));
}

}  // namespace

MemoryLimit available_memory(const fs::path& root) {
  MemoryLimit least{std::numeric_limits<std::int64_t>::max(), "64 bits"};
  const auto consider = [&](std::optional<std::int64_t> bytes, const char* source) {
    if (bytes && *bytes < least.bytes) {
      least = {*bytes, source};
    }
  };
  if (const auto kilobytes = number_in(root / "proc/meminfo", "MemAvailable:")) {
    consider(*kilobytes * 1024, "MemAvailable");
  }
  consider(left_in_cgroups(root), "the memory cgroup");
  if (const auto limit = limit_of(RLIMIT_AS)) {
    const std::int64_t used =
        number_in(root / "proc/self/statm").value_or(0) * sysconf(_SC_PAGESIZE);
    consider(std::max<std::int64_t>(*limit - used, 0), "RLIMIT_AS");
  }
  consider(limit_of(RLIMIT_FSIZE), "RLIMIT_FSIZE");  // limits a memory file as any other file
  return least;
}

void check_available(std::int64_t bytes) {
  // Reading the limits takes a quarter of a millisecond, longer than small memory takes to fill. A
  // file beyond RLIMIT_FSIZE would end the process.
  constexpr std::int64_t kSmall = 1 << 20;
  if (bytes <= std::min(kSmall, limit_of(RLIMIT_FSIZE).value_or(kSmall))) {
    return;
  }
  const MemoryLimit limit = available_memory();
  if (bytes > limit.bytes) {
    throw std::length_error("shared memory: expected at most " + std::to_string(limit.bytes) +
                            " bytes (" + limit.source + "), got " + std::to_string(bytes));
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
