# Warnings and sanitizers, the same for every target of this project and for no target of a consumer.
function(pycollect_compile_options target)
  if(NOT PROJECT_IS_TOP_LEVEL)
    target_compile_options(${target} PRIVATE -w)  # a consumer's -Wall -Werror is for its own code
    return()
  endif()
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<BOOL:${PYCOLLECT_WERROR}>:-Werror>)
  # GCC 12 sees an overlap in "..." + std::string that is not there (its bug 105651).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict)
  endif()
  if(PYCOLLECT_SANITIZE)
    target_compile_options(${target} PUBLIC
      -fsanitize=${PYCOLLECT_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1)
    target_link_options(${target} PUBLIC -fsanitize=${PYCOLLECT_SANITIZE})
  endif()
endfunction()

# What most files of a target include is parsed once: a quarter of the time that it takes. Each file
# still includes what it uses. A consumer's build is left as plain as it is.
function(pycollect_precompile target)
  if(PROJECT_IS_TOP_LEVEL)
    target_precompile_headers(${target} PRIVATE
      <algorithm> <cstddef> <cstdint> <cstring> <memory> <optional> <span> <stdexcept> <string>
      <utility> <vector> ${ARGN})
  endif()
endfunction()

# What links the library shows none of its names: neither those of the archive, which are hidden,
# nor those that a consumer's compiler makes of inline functions and templates in the headers. A
# linker takes one nameless version script: who has another sets PYCOLLECT_EXPORTS on the target.
function(pycollect_hide_in_shared_libraries target)
  set(type $<TARGET_PROPERTY:TYPE>)
  set(shared $<OR:$<STREQUAL:${type},SHARED_LIBRARY>,$<STREQUAL:${type},MODULE_LIBRARY>>)
  set(wanted $<AND:${shared},$<NOT:$<BOOL:$<TARGET_PROPERTY:PYCOLLECT_EXPORTS>>>>)
  set(script LINKER:--version-script=)
  target_link_options(${target} INTERFACE
    $<BUILD_INTERFACE:$<${wanted}:${script}${PROJECT_SOURCE_DIR}/cmake/pycollect-hidden.map>>
    $<INSTALL_INTERFACE:$<${wanted}:${script}$<INSTALL_PREFIX>/${PYCOLLECT_CMAKE_DIR}/pycollect-hidden.map>>)
endfunction()
