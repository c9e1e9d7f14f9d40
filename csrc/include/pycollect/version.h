// The version, as macros and as a function, and the namespace that contains the ABI.
//
// Versions are semantic: within one major version, a newer minor version accepts all code for an
// older one. Before 1.0.0 this holds only for the patches of one minor version.
//
// Code that was compiled for an incompatible version, or with another form of std::string, cannot
// be linked with the library, because the symbol names differ. Public types contain strings and
// vectors; without this, such a program would link and crash.
#pragma once

#include <string_view>  // defines _GLIBCXX_USE_CXX11_ABI and _LIBCPP_ABI_VERSION

#if __cplusplus < 202002L
#error "pycollect needs C++20: compile with -std=c++20, or CMake's cxx_std_20"
#endif

// The only definition of the version: CMake and the Python package read it here.
#define PYCOLLECT_VERSION_MAJOR 0
#define PYCOLLECT_VERSION_MINOR 1
#define PYCOLLECT_VERSION_PATCH 0

// For `#if`: 1002003 is 1.2.3.
#define PYCOLLECT_VERSION_NUMBER \
  (PYCOLLECT_VERSION_MAJOR * 1000000 + PYCOLLECT_VERSION_MINOR * 1000 + PYCOLLECT_VERSION_PATCH)
#define PYCOLLECT_TEXT_OF(x) #x
#define PYCOLLECT_DOTTED(major, minor, patch) \
  PYCOLLECT_TEXT_OF(major) "." PYCOLLECT_TEXT_OF(minor) "." PYCOLLECT_TEXT_OF(patch)
#define PYCOLLECT_VERSION \
  PYCOLLECT_DOTTED(PYCOLLECT_VERSION_MAJOR, PYCOLLECT_VERSION_MINOR, PYCOLLECT_VERSION_PATCH)

// The names of pycollect are in a namespace such as pycollect::v0_1_cxx11. As it is inline, they
// are also found in pycollect::.
#if defined(_LIBCPP_ABI_VERSION)
#define PYCOLLECT_STRING_ABI libcpp
#elif defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
#define PYCOLLECT_STRING_ABI cxx11
#else
#define PYCOLLECT_STRING_ABI cxx98
#endif
#if PYCOLLECT_VERSION_MAJOR == 0
#define PYCOLLECT_JOIN(major, minor, string) v##major##_##minor##_##string
#else
#define PYCOLLECT_JOIN(major, minor, string) v##major##_##string
#endif
#define PYCOLLECT_ABI_OF(major, minor, string) PYCOLLECT_JOIN(major, minor, string)
#define PYCOLLECT_ABI \
  PYCOLLECT_ABI_OF(PYCOLLECT_VERSION_MAJOR, PYCOLLECT_VERSION_MINOR, PYCOLLECT_STRING_ABI)

namespace pycollect::inline PYCOLLECT_ABI {

// The version of the linked library, "1.2.3"; PYCOLLECT_VERSION is the version of the headers.
std::string_view version() noexcept;

}  // namespace pycollect::inline PYCOLLECT_ABI
