#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bindings.h"
#include "signals.h"

namespace pycollect::python {
namespace {

class FairLock;

// The GIL guards all state in this file. So a change that does not release the GIL is atomic for
// other threads, for signal handlers and for forks.
std::set<const FairLock*> living;
unsigned long ending = 0;  // identifier of the thread that ends the program, else 0
std::set<unsigned long> suspended;

void forget_the_end_in_fork() {
  ending = 0;
  suspended.clear();
}

// Sleeps forever without the GIL, unless the calling thread ends the program. A thread that takes
// the GIL or runs code of torch while the interpreter ends would abort the process.
void sleep_if_another_ends(unsigned long me) {
  if (ending == 0 || ending == me) {
    return;
  }
  suspended.insert(me);
  PyEval_SaveThread();
  while (true) {
    pause();
  }
}

// A thread that waits for a lock.
class Waiter {
 public:
  explicit Waiter(unsigned long identifier) : thread(identifier), turn_(PyThread_allocate_lock()) {
    if (!turn_) {
      throw std::bad_alloc();
    }
    PyThread_acquire_lock(turn_.get(), NOWAIT_LOCK);
  }

  // Waits for the turn. If `interruptible`, also returns after a signal or 50 ms.
  void sleep(bool interruptible) {
    const py::gil_scoped_release release;
    PyThread_acquire_lock_timed(turn_.get(), interruptible ? 50'000 : -1, interruptible ? 1 : 0);
  }

  void wake() { PyThread_release_lock(turn_.get()); }

  const unsigned long thread;

 private:
  struct Free {
    void operator()(PyThread_type_lock lock) const { PyThread_free_lock(lock); }
  };
  std::unique_ptr<void, Free> turn_;
};

class FairLock {
 public:
  FairLock() { living.insert(this); }
  FairLock(const FairLock&) = delete;
  FairLock& operator=(const FairLock&) = delete;
  ~FairLock() { living.erase(this); }

  bool is_own_process() const { return getpid() == process_; }
  bool is_busy() const { return owner_ != 0; }
  std::size_t n_waiting() const { return queue_.size(); }

  // Whether a thread holds the lock which is neither suspended nor ends the program.
  bool is_in_use() const {
    return is_own_process() && owner_ != 0 && owner_ != ending && suspended.count(owner_) == 0;
  }

  void check_own_process() const {
    if (!is_own_process()) {
      throw std::runtime_error("the collector belongs to process " + std::to_string(process_) +
                               ", and this process is a fork of it; create a new collector in "
                               "this process");
    }
  }

  void enter() {
    check_own_process();
    const unsigned long me = PyThread_get_thread_ident();
    if (owner_ == me) {
      ++depth_;
      return;
    }
    sleep_if_another_ends(me);
    if (owner_ == 0) {
      owner_ = me;
      depth_ = 1;
      return;
    }
    await_turn(me);
    if (ending != 0 && ending != me) {
      leave();
    }
  }

  bool enter_if_free() {
    check_own_process();
    if (owner_ != 0) {
      return false;
    }
    enter();
    return true;
  }

  void exit(bool raising) {
    // A policy or hook may have forked and returned in the child. The exception that it raises
    // there must not be replaced.
    if (raising && !is_own_process()) {
      return;
    }
    check_own_process();
    leave();
  }

 private:
  void await_turn(unsigned long me) {
    Waiter waiter(me);
    queue_.push_back(&waiter);
    try {
      while (owner_ != me) {
        waiter.sleep(me == main_thread_);
        if (owner_ != me) {
          check_signals();
        }
      }
    } catch (...) {
      if (std::erase(queue_, &waiter) == 0) {  // the turn came while the handler ran
        leave();
      }
      throw;
    }
    // A signal handler that interrupted a waiting thread enters when the turn of that thread comes.
    if (std::erase(queue_, &waiter) != 0) {
      ++depth_;
    }
  }

  void leave() {
    if (--depth_ != 0) {
      return;
    }
    pass_on();
    sleep_if_another_ends(PyThread_get_thread_ident());
  }

  // While the program ends, only the ending thread gets its turn. The others sleep forever.
  void pass_on() {
    owner_ = 0;
    const auto next = std::find_if(queue_.begin(), queue_.end(), [](const Waiter* waiter) {
      return ending == 0 || ending == waiter->thread;
    });
    if (next != queue_.end()) {
      Waiter& waiter = **next;
      queue_.erase(next);
      owner_ = waiter.thread;
      depth_ = 1;
      waiter.wake();
    }
  }

  const pid_t process_ = getpid();
  const unsigned long main_thread_ = main_thread();
  std::vector<Waiter*> queue_;  // in order of arrival
  unsigned long owner_ = 0;     // identifier of the thread that holds the lock, else 0
  int depth_ = 0;               // how often the owner has entered
};

void keep_others_out() { ending = PyThread_get_thread_ident(); }

void await_others(double timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout);
  while (std::any_of(living.begin(), living.end(),
                     [](const FairLock* lock) { return lock->is_in_use(); }) &&
         Clock::now() < deadline) {
    {
      const py::gil_scoped_release release;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    check_signals();
  }
}

}  // namespace

void bind_fair_lock(py::module_& module) {
  pthread_atfork(nullptr, nullptr, forget_the_end_in_fork);
  py::class_<FairLock>(module, "FairLock",
                       "A reentrant lock that serves threads in the order of their arrival.")
      .def(py::init<>())
      .def("__enter__", &FairLock::enter)
      .def("__exit__", [](FairLock& self, const py::object& error, py::handle,
                          py::handle) { self.exit(!error.is_none()); })
      .def("enter_if_free", &FairLock::enter_if_free)
      .def("check_own_process", &FairLock::check_own_process)
      .def_property_readonly("is_own_process", &FairLock::is_own_process)
      .def_property_readonly("is_busy", &FairLock::is_busy)
      .def_property_readonly("n_waiting", &FairLock::n_waiting)
      .def_static("keep_others_out", &keep_others_out)
      .def_static("await_others", &await_others, py::arg("timeout"));
}

}  // namespace pycollect::python
