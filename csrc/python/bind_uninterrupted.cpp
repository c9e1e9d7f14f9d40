#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <vector>

#include "bindings.h"
#include "pycollect/detail/owning_process.h"
#include "signals.h"

namespace pycollect::python {
namespace {

constexpr int kSignals = 32;  // real-time signals are not deferred

// Python calls signal handlers only in the main thread, so only that thread defers signals. The GIL
// guards all of this state except `pending`, which note() sets.
int depth = 0;
pthread_t deferring{};  // the thread that defers signals, if depth > 0
std::array<volatile sig_atomic_t, kSignals> pending{};

struct Deferred {
  int signal;
  struct sigaction usual;
};
std::vector<Deferred> deferred;

void note(int signal) { pending[static_cast<std::size_t>(signal)] = 1; }

py::object attribute_of(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

// A signal that reports an error of this thread cannot be deferred. Each deferred signal costs 30
// ns.
bool may_be_deferred(int signal) {
  constexpr std::array kNot{SIGKILL, SIGSTOP, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
  return std::find(kNot.begin(), kNot.end(), signal) == kNot.end();
}

// Defers the signals that have a Python handler. Handlers in C, such as those of faulthandler,
// cannot raise.
void defer_all() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  const py::object& handler_of =
      storage.call_once_and_store_result([] { return attribute_of("_signal", "getsignal"); })
          .get_stored();
  struct sigaction own{};
  own.sa_handler = note;
  own.sa_flags = SA_RESTART;
  sigemptyset(&own.sa_mask);
  for (int signal = 1; signal < kSignals; ++signal) {
    if (!may_be_deferred(signal)) {
      continue;
    }
    const py::object handler = handler_of(signal);
    if (PyCallable_Check(handler.ptr()) != 0) {
      Deferred& last = deferred.emplace_back();
      last.signal = signal;
      pending[static_cast<std::size_t>(signal)] = 0;
      sigaction(signal, &own, &last.usual);
    }
  }
}

void leave() {
  if (--depth > 0) {
    return;
  }
  for (const Deferred& own : deferred) {
    sigaction(own.signal, &own.usual, nullptr);
    if (pending[static_cast<std::size_t>(own.signal)] != 0) {
      PyErr_SetInterruptEx(own.signal);  // the next check of signals calls its handler
    }
  }
  deferred.clear();
}

void enter() {
  if (depth++ == 0) {
    deferring = pthread_self();
    defer_all();
  }
  if (PyErr_CheckSignals() != 0) {  // handle earlier signals before the block
    py::error_already_set error;
    leave();
    throw error;
  }
}

// If another thread forks, the child lacks the thread that defers signals, so nothing would restore
// their handlers.
void restore_in_fork() {
  if (depth > 0 && pthread_equal(deferring, pthread_self()) == 0) {
    for (const Deferred& own : deferred) {
      sigaction(own.signal, &own.usual, nullptr);
    }
    deferred.clear();
    depth = 0;
  }
}

struct Uninterrupted {
  bool defers = false;  // set on entry: only the main thread defers signals
};

}  // namespace

void check_signals() {
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

unsigned long main_thread() {
  static unsigned epoch = 0;
  static unsigned long number = 0;
  if (const unsigned now = fork_epoch.load(); number == 0 || epoch != now) {
    number = attribute_of("threading", "main_thread")().attr("ident").cast<unsigned long>();
    epoch = now;
  }
  return number;
}

void bind_uninterrupted(py::module_& module) {
  pthread_atfork(nullptr, nullptr, restore_in_fork);
  py::class_<Uninterrupted>(module, "Uninterrupted",
                            "A block in which no signal handler of the program is called.")
      .def(py::init<>())
      .def("__enter__",
           [](Uninterrupted& self) {
             self.defers = PyThread_get_thread_ident() == main_thread();
             if (self.defers) {
               enter();
             }
           })
      .def("__exit__",
           [](const Uninterrupted& self, const py::object& error, py::handle, py::handle) {
             if (!self.defers) {
               return;
             }
             leave();
             if (error.is_none()) {
               check_signals();
             }
           });
}

}  // namespace pycollect::python
