// Conversion of SharedAddress to and from a tuple of five ints, which can be sent to another
// process.
#pragma once

#include <pybind11/stl.h>

#include <tuple>

#include "pycollect/slab.h"

namespace pycollect::python {

// (pid, fd, inode, offset, bytes)
using Address = std::tuple<std::int64_t, std::int64_t, std::uint64_t, std::int64_t, std::int64_t>;

inline Address to_python(const SharedAddress& address) {
  return {address.pid, address.fd, address.inode, address.offset, address.bytes};
}

inline SharedAddress from_python(const Address& address) {
  const auto& [pid, fd, inode, offset, bytes] = address;
  return {pid, fd, inode, offset, bytes};
}

}  // namespace pycollect::python
