# Sets the same warnings and sanitizers for all targets of this project. Does not affect targets of
# a consumer.
function(pycollect_compile_options target)
  if(NOT PROJECT_IS_TOP_LEVEL)
    target_compile_options(${target} PRIVATE -w)  # a consumer's -Werror must not fail this build
    return()
  endif()
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<BOOL:${PYCOLLECT_WERROR}>:-Werror>)
  # GCC 12 wrongly warns of an overlap in "..." + std::string (GCC bug 105651).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict)
  endif()
  if(PYCOLLECT_SANITIZE)
    target_compile_options(${target} PUBLIC
      -fsanitize=${PYCOLLECT_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1)
    target_link_options(${target} PUBLIC -fsanitize=${PYCOLLECT_SANITIZE})
  endif()
endfunction()

# Precompiles the headers that most files of a target include; parsing them is a quarter of the
# build time. Each file still includes the headers that it uses. A consumer's build has no
# precompiled headers.
function(pycollect_precompile target)
  if(PROJECT_IS_TOP_LEVEL)
    target_precompile_headers(${target} PRIVATE
      <algorithm> <cstddef> <cstdint> <cstring> <memory> <optional> <span> <stdexcept> <string>
      <utility> <vector> ${ARGN})
  endif()
endfunction()

# Hides the library's names in shared libraries that link it: the names of the archive are hidden
# already, but a consumer's compiler also emits inline functions and templates of the headers. A
# linker accepts one anonymous version script; a target with its own script must set
# PYCOLLECT_EXPORTS.
function(pycollect_hide_in_shared_libraries target)
  set(type $<TARGET_PROPERTY:TYPE>)
  set(shared $<OR:$<STREQUAL:${type},SHARED_LIBRARY>,$<STREQUAL:${type},MODULE_LIBRARY>>)
  set(wanted $<AND:${shared},$<NOT:$<BOOL:$<TARGET_PROPERTY:PYCOLLECT_EXPORTS>>>>)
  set(script LINKER:--version-script=)
  target_link_options(${target} INTERFACE
    $<BUILD_INTERFACE:$<${wanted}:${script}${PROJECT_SOURCE_DIR}/cmake/pycollect-hidden.map>>
    $<INSTALL_INTERFACE:$<${wanted}:${script}$<INSTALL_PREFIX>/${PYCOLLECT_CMAKE_DIR}/pycollect-hidden.map>>)
endfunction()
