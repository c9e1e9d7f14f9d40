# Contents of a wheel besides the module: the headers and sources of the core, in the same folders
# as here, and the CMake package that builds them.
set(sources pycollect/share/pycollect)
install(FILES CMakeLists.txt DESTINATION ${sources} COMPONENT python)
install(DIRECTORY csrc/include csrc/src DESTINATION ${sources}/csrc COMPONENT python)
install(FILES csrc/cuda/gather.h DESTINATION ${sources}/csrc/cuda COMPONENT python)
install(FILES cmake/options.cmake cmake/pycollect-hidden.map cmake/unoptimized.cmake
  cmake/version.cmake DESTINATION ${sources}/cmake COMPONENT python)
install(FILES cmake/wheel/pycollectConfig.cmake
  ${PROJECT_BINARY_DIR}/wheel/pycollectConfigVersion.cmake
  DESTINATION pycollect/share/cmake/pycollect COMPONENT python)
