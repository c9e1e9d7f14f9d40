#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdlib>

int main(int argc, char** argv) {
  // Before anything asks for CUDA; on a machine that has it, too, so that tests say when copies
  // end.
  setenv("PYCOLLECT_CUDA_LIBRARY", FAKE_CUDA_LIBRARY, 1);
  setenv("FAKE_CUDA_DEVICES", "2", 1);
  return doctest::Context(argc, argv).run();
}
