// Python's signals, for bindings that wait or that must not be interrupted.
#pragma once

namespace pycollect::python {

// Calls the handlers of signals that have arrived, in the main thread. Throws the exception of a
// handler.
void check_signals();

// Identifier of Python's main thread, in which Python calls signal handlers. May call Python.
unsigned long main_thread();

}  // namespace pycollect::python
