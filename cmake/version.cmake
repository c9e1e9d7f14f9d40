# Reads the version from its only definition, a C++ header.
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/../csrc/include/pycollect/version.h PYCOLLECT_VERSION
  REGEX "^#define PYCOLLECT_VERSION_(MAJOR|MINOR|PATCH) [0-9]+$")
list(TRANSFORM PYCOLLECT_VERSION REPLACE ".* " "")
list(JOIN PYCOLLECT_VERSION "." PYCOLLECT_VERSION)
