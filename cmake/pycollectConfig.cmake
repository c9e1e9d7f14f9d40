# find_package(pycollect): defines the target pycollect::core, a prebuilt archive.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/pycollectTargets.cmake)
