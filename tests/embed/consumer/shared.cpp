#include "use.h"

// Exported, like all of a library that asks for no visibility.
std::int64_t consumers_own() {
  return frames_of_a_batch() + static_cast<std::int64_t>(text_of_an_error().size());
}
