# find_package(pycollect): defines the target pycollect::core, built from the sources in this
# package with the consumer's compiler and flags. An archive would fix the ABI of std::string, the
# standard library and the sanitizers.
if(NOT TARGET pycollect::core)
  add_subdirectory(${CMAKE_CURRENT_LIST_DIR}/../../pycollect
    ${CMAKE_BINARY_DIR}/pycollect-core EXCLUDE_FROM_ALL)
endif()
