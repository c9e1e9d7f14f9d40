# find_package(pycollect): the target pycollect::core, an archive that was built before.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/pycollectTargets.cmake)
