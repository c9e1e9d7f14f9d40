#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

std::string_view version() noexcept { return PYCOLLECT_VERSION; }

}  // namespace pycollect::inline PYCOLLECT_ABI
