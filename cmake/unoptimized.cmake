# Warns once per build folder if CMAKE_BUILD_TYPE is not set, because CMake then does not optimize.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES AND NOT CMAKE_CXX_FLAGS MATCHES "-O"
   AND NOT PYCOLLECT_WARNED_UNOPTIMIZED)
  message(WARNING "pycollect is built without optimization: CMAKE_BUILD_TYPE is not set. "
    "This is many times slower; configure with -DCMAKE_BUILD_TYPE=Release.")
  set(PYCOLLECT_WARNED_UNOPTIMIZED TRUE CACHE INTERNAL "")
endif()
