#include <doctest/doctest.h>

#include <string>

#include "pycollect/version.h"

TEST_CASE("headers and library have the same version") {
  CHECK(pycollect::version() == PYCOLLECT_VERSION);
  const std::string numbers = std::to_string(PYCOLLECT_VERSION_MAJOR) + "." +
                              std::to_string(PYCOLLECT_VERSION_MINOR) + "." +
                              std::to_string(PYCOLLECT_VERSION_PATCH);
  CHECK(pycollect::version() == numbers);
  CHECK(PYCOLLECT_VERSION_NUMBER == PYCOLLECT_VERSION_MAJOR * 1000000 +
                                        PYCOLLECT_VERSION_MINOR * 1000 + PYCOLLECT_VERSION_PATCH);
}
