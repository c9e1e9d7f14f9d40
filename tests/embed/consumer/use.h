// Everything that crosses the library's boundary: strings, vectors, inline functions, and an
// exception.
#pragma once

#include <pycollect/pycollect.h>

#include <stdexcept>
#include <string>
#include <vector>

// The number of frames in a batch of two environments and three steps, as the library counts them.
inline std::int64_t frames_of_a_batch() {
  const pycollect::Layout layout({{{"observation"}, pycollect::DType::float32, {4}},
                                  {{"next", "done"}, pycollect::DType::boolean, {1}}});
  pycollect::SlabPool pool({layout, {.workers = 1, .envs = 2, .steps = 3}}, 1, false);
  const auto slab = pool.acquire();
  const pycollect::TensorView done =
      slab->placement().view(slab->data(), static_cast<std::size_t>(layout.find({"next", "done"})));
  pycollect::zero(done);
  const pycollect::SplitPlan plan(done, std::nullopt, std::nullopt, 3);
  return plan.frames();
}

// The text of an error that the library throws.
inline std::string text_of_an_error() {
  try {
    pycollect::dtype_named("float33");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}
