// Shared by the tests of CUDA code: resets the fake driver, and checks at the end that everything
// was freed.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <string>

#include "fake_cuda.h"
#include "pycollect/cuda.h"

struct FakeCuda {
  FakeCuda() {
    pycollect::cuda::available();  // opens the library before the log is cleared
    fake_cuda_reset();
  }
  ~FakeCuda() {
    CHECK(fake_cuda_live() == 0);
    CHECK(fake_cuda_freed_while_queued() == 0);
    fake_cuda_reset();
  }
  std::string log() const { return fake_cuda_log(); }
  // The number of calls of this symbol, including failed ones.
  int calls(const std::string& symbol) const {
    int count = 0;
    const std::string lines = "\n" + log();
    for (std::size_t at = 0; (at = lines.find("\n" + symbol, at)) != std::string::npos; ++at) {
      ++count;
    }
    return count;
  }
};
