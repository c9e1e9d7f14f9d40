# What a wheel has besides the module: the core's headers and sources, in the folders that they have
# here, and the CMake package that builds them.
set(sources pycollect/share/pycollect)
install(FILES CMakeLists.txt DESTINATION ${sources} COMPONENT python)
install(DIRECTORY csrc/include csrc/src csrc/ipc csrc/gather DESTINATION ${sources}/csrc
  COMPONENT python PATTERN gather.cu EXCLUDE)
install(FILES cmake/options.cmake cmake/pycollect-hidden.map cmake/unoptimised.cmake
  cmake/version.cmake DESTINATION ${sources}/cmake COMPONENT python)
install(FILES cmake/wheel/pycollectConfig.cmake
  ${PROJECT_BINARY_DIR}/wheel/pycollectConfigVersion.cmake
  DESTINATION pycollect/share/cmake/pycollect COMPONENT python)
