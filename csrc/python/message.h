// Conversion of messages to and from Python bytes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>
#include <string_view>

#include "pycollect/detail/mailbox.h"

namespace pycollect::python {

inline std::span<const std::byte> view_of(const pybind11::bytes& message) {
  const std::string_view text = message;
  return std::as_bytes(std::span(text.data(), text.size()));
}

inline pybind11::bytes to_bytes(const Message& message) {
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}

}  // namespace pycollect::python
