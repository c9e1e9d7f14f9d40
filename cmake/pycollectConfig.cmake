# find_package(pycollect): the targets pycollect::core and pycollect::ipc, built archives.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/pycollectTargets.cmake)
