# `cmake --install`: archive, headers, the CMake package and a pkg-config file. The build folder
# contains the same CMake package.
include(CMakePackageConfigHelpers)

install(TARGETS pycollect_core pycollect_ipc EXPORT pycollectTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(DIRECTORY csrc/include/pycollect csrc/ipc/include/pycollect DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development)
if(PYCOLLECT_GATHER)
  install(DIRECTORY csrc/gather/include/pycollect DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
    COMPONENT development)
endif()

# Before 1.0.0, minor versions are incompatible; see version.h.
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(compatibility SameMinorVersion)
else()
  set(compatibility SameMajorVersion)
endif()
write_basic_package_version_file(${PROJECT_BINARY_DIR}/pycollectConfigVersion.cmake
  COMPATIBILITY ${compatibility})
# The wheel's CMake package contains sources, so it suits any architecture.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/wheel/pycollectConfigVersion.cmake
  COMPATIBILITY ${compatibility} ARCH_INDEPENDENT)
configure_file(cmake/pycollectConfig.cmake ${PROJECT_BINARY_DIR}/pycollectConfig.cmake COPYONLY)
install(EXPORT pycollectTargets NAMESPACE pycollect:: DESTINATION ${PYCOLLECT_CMAKE_DIR}
  COMPONENT development)
install(FILES cmake/pycollectConfig.cmake ${PROJECT_BINARY_DIR}/pycollectConfigVersion.cmake
  cmake/pycollect-hidden.map
  DESTINATION ${PYCOLLECT_CMAKE_DIR} COMPONENT development)
export(EXPORT pycollectTargets NAMESPACE pycollect::
  FILE ${PROJECT_BINARY_DIR}/pycollectTargets.cmake)

configure_file(cmake/pycollect.pc.in pycollect.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/pycollect.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
