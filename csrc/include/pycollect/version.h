// The version, as macros and as a function, and the namespace that carries the ABI.
//
// Versions are semantic: of one major version, a newer minor one takes whatever an older one took.
// Before 1.0.0 that holds for patches of one minor version alone.
//
// What is compiled against one version, or with one form of std::string, cannot be linked with a
// library of an incompatible version or of the other form: their names differ. Types here hold
// strings and vectors, so that such a program would link and crash instead.
#pragma once

#include <string_view>  // defines _GLIBCXX_USE_CXX11_ABI and _LIBCPP_ABI_VERSION

#if __cplusplus < 202002L
#error "pycollect needs C++20: compile with -std=c++20, or CMake's cxx_std_20"
#endif

// The one place where the version stands: CMake and the Python package read it here.
#define PYCOLLECT_VERSION_MAJOR 0
#define PYCOLLECT_VERSION_MINOR 1
#define PYCOLLECT_VERSION_PATCH 0

// 1002003 is 1.2.3, for `#if`.
#define PYCOLLECT_VERSION_NUMBER \
  (PYCOLLECT_VERSION_MAJOR * 1000000 + PYCOLLECT_VERSION_MINOR * 1000 + PYCOLLECT_VERSION_PATCH)
#define PYCOLLECT_TEXT_OF(x) #x
#define PYCOLLECT_DOTTED(major, minor, patch) \
  PYCOLLECT_TEXT_OF(major) "." PYCOLLECT_TEXT_OF(minor) "." PYCOLLECT_TEXT_OF(patch)
#define PYCOLLECT_VERSION \
  PYCOLLECT_DOTTED(PYCOLLECT_VERSION_MAJOR, PYCOLLECT_VERSION_MINOR, PYCOLLECT_VERSION_PATCH)

// pycollect's names lie in pycollect::v0_1_cxx11, or the like, and are found in pycollect:: alike.
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

// "1.2.3": the version of the library that was linked, where PYCOLLECT_VERSION is that of the
// headers.
std::string_view version() noexcept;

}  // namespace pycollect::inline PYCOLLECT_ABI
