# Without a build type CMake does not optimize. This warns of it, once per build folder.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES AND NOT CMAKE_CXX_FLAGS MATCHES "-O"
   AND NOT PYCOLLECT_SAID_UNOPTIMISED)
  message(WARNING "pycollect is built without optimization: CMAKE_BUILD_TYPE is not set. "
    "This is many times slower; configure with -DCMAKE_BUILD_TYPE=Release.")
  set(PYCOLLECT_SAID_UNOPTIMISED TRUE CACHE INTERNAL "")
endif()
