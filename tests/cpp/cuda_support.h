// What tests of CUDA's part share: a fake driver as new, and whether it was left as it was found.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <string>

#include "fake_cuda.h"
#include "pycollect/cuda.h"

struct FakeCuda {
  FakeCuda() {
    pycollect::cuda::available();  // so that opening the library is in nobody's log
    fake_cuda_reset();
  }
  ~FakeCuda() {
    CHECK(fake_cuda_live() == 0);
    CHECK(fake_cuda_freed_while_queued() == 0);
    fake_cuda_reset();
  }
  std::string log() const { return fake_cuda_log(); }
  // How many calls of that symbol were made, failed ones included.
  int calls(const std::string& symbol) const {
    int count = 0;
    const std::string lines = "\n" + log();
    for (std::size_t at = 0; (at = lines.find("\n" + symbol, at)) != std::string::npos; ++at) {
      ++count;
    }
    return count;
  }
};
