#include <cstdio>

#include "use.h"

int main() {
  std::printf("%s, %d frames, %s\n", std::string(pycollect::version()).c_str(),
              static_cast<int>(frames_of_a_batch()), text_of_an_error().c_str());
}
