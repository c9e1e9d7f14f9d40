// SharedNumber: a number that several threads or processes share. The pointer keeps its memory
// alive.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

using SharedNumber = std::shared_ptr<std::atomic<std::uint64_t>>;

}  // namespace pycollect::inline PYCOLLECT_ABI
