#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdlib>

int main(int argc, char** argv) {
  // Set before the first use of CUDA. The fake is used even if the machine has CUDA, because tests
  // control when its copies end.
  setenv("PYCOLLECT_CUDA_LIBRARY", FAKE_CUDA_LIBRARY, 1);
  setenv("FAKE_CUDA_DEVICES", "2", 1);
  return doctest::Context(argc, argv).run();
}
