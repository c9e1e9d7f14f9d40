// EnvTable: lets pycollect._core step the environments of another extension module.
//
// The two modules may use different compilers, standard libraries, forms of std::string and
// versions of pycollect. Therefore only C types cross between them: functions and addresses of
// arrays. The interface has a version number, which both sides compare.
#pragma once

#include <cstdint>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::detail {

// The version of EnvTable and of the method's return value below. Increment it with every change of
// either.
inline constexpr int kEnvForm = 1;

// The method by which collectors recognize an object that holds environments. It returns
//
//     (form, version of pycollect, table, envs, seeds, observations, actions)
//
// The table is a capsule with the name below. `seeds` is the number of seeds that the method
// `_seed` takes. Leaves are tuples (key, dtype, shape). If a function of the table returns 0, the
// method `_raise` raises the environments' exception.
inline constexpr const char* kEnvMethod = "__pycollect_env__";
inline constexpr const char* kEnvTableName = "pycollect.env_table";

// Functions for one thread at a time. They need no GIL and throw nothing. Arrays are contiguous,
// [P, *shape], one per leaf; their addresses may differ from call to call.
struct EnvTable {
  void* environments;  // lives as long as the object
  int (*reset)(void* environments, const std::uint8_t* mask, void* const* observations);
  int (*step)(void* environments, const void* const* actions, void* const* observations,
              double* rewards, std::uint8_t* terminated, std::uint8_t* truncated);
};

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
