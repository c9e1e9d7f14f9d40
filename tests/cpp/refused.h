#pragma once

// Checks errors by class and argument, independent of their wording.

#include <doctest/doctest.h>

#include <string>

namespace pycollect::tests {

// Returns the refused argument: the text before the first colon of the `Error` that `call` throws.
template <typename Error, typename Call>
std::string refused(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string text = error.what();
    return text.substr(0, text.find(": "));
  }
  return "(no error)";
}

}  // namespace pycollect::tests

#define CHECK_REFUSED(expression, argument, Error) \
  CHECK(::pycollect::tests::refused<Error>([&] { static_cast<void>(expression); }) == (argument))
