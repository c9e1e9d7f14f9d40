#include <signal.h>

#include "bindings.h"

namespace pycollect::python {
namespace {

// SIGINT while blocks run that are not to be interrupted. The GIL guards all but the note.
int depth = 0;
volatile sig_atomic_t came = 0;
struct sigaction usual{};

void note(int) { came = 1; }

void check_signals() {
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

void leave() {
  if (--depth > 0) {
    return;
  }
  sigaction(SIGINT, &usual, nullptr);
  if (came != 0) {
    raise(SIGINT);  // whoever handles it otherwise does so now
  }
}

void enter() {
  if (depth++ == 0) {
    came = 0;
    struct sigaction own{};
    own.sa_handler = note;
    own.sa_flags = SA_RESTART;
    sigemptyset(&own.sa_mask);
    sigaction(SIGINT, &own, &usual);
  }
  if (PyErr_CheckSignals() != 0) {  // one that came before is not to be raised within
    py::error_already_set error;
    leave();
    throw error;
  }
}

struct Uninterrupted {};

}  // namespace

void bind_uninterrupted(py::module_& module) {
  py::class_<Uninterrupted>(module, "Uninterrupted", "A block that SIGINT does not interrupt.")
      .def(py::init<>())
      .def("__enter__", [](const Uninterrupted&) { enter(); })
      .def("__exit__", [](const Uninterrupted&, const py::object& error, py::handle, py::handle) {
        leave();
        if (error.is_none()) {
          check_signals();
        }
      });
}

}  // namespace pycollect::python
