# Warnings and sanitizers, the same for every target of this project and for no target of a consumer.
function(pycollect_compile_options target)
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
