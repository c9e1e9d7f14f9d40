# find_package(pycollect): the target pycollect::core, built from the sources in this package by the
# compiler of whoever asks, with its flags. An archive would have one form of std::string, one
# standard library and no sanitizer.
if(NOT TARGET pycollect::core)
  add_subdirectory(${CMAKE_CURRENT_LIST_DIR}/../../pycollect
    ${CMAKE_BINARY_DIR}/pycollect-core EXCLUDE_FROM_ALL)
endif()
