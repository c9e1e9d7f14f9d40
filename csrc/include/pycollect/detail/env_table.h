// EnvTable: how environments of one extension module are stepped by another one, pycollect._core.
//
// The two may have been compiled by different compilers, with different standard libraries and
// forms of std::string, against different versions of pycollect: so what crosses is C, functions
// and addresses of arrays alone. Its form has a number, which both ends compare.
#pragma once

#include <cstdint>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::detail {

// Of EnvTable, and of what the method below returns. To be counted up with every change of either.
inline constexpr int kEnvForm = 1;

// What an object that holds environments has a method of, by which collectors know it. It returns
//     (form, version of pycollect, table, envs, seeds, observations, actions)
// with a capsule of the name below, how many seeds its method `_seed` takes, and leaves as tuples
// (key, dtype, shape). Where a function of the table returned 0, its method `_raise` raises what
// the environments threw.
inline constexpr const char* kEnvMethod = "__pycollect_env__";
inline constexpr const char* kEnvTableName = "pycollect.env_table";

// Functions for one thread at a time, which need no GIL and throw nothing. Arrays are contiguous,
// [P, *shape], one per leaf, and stay where they are from call to call only by chance.
struct EnvTable {
  void* environments;  // lives as long as the object
  int (*reset)(void* environments, const std::uint8_t* mask, void* const* observations);
  int (*step)(void* environments, const void* const* actions, void* const* observations,
              double* rewards, std::uint8_t* terminated, std::uint8_t* truncated);
};

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
