# find_package(pycollect): defines the targets pycollect::core and pycollect::ipc, static libraries.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/pycollectTargets.cmake)
