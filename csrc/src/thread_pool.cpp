#include "pycollect/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

// Ranges per thread: enough that a thread which is interrupted does not hold up the others.
constexpr std::int64_t kRangesPerThread = 4;

std::atomic<ThreadPool*> shared_pool{nullptr};

}  // namespace

// A loop that is being run; lives on the stack of its caller.
struct ThreadPool::Job {
  Body body;
  void* context;
  std::int64_t n;
  std::int64_t step;
  std::atomic<std::int64_t> next{0};
  int helpers = 0;  // that work on it now; guarded by the pool's mutex
  std::mutex error_mutex{};
  std::exception_ptr error{};

  void work() {
    for (;;) {
      const std::int64_t begin = next.fetch_add(step);
      if (begin >= n) {
        return;
      }
      try {
        body(context, begin, std::min(begin + step, n));
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) {
          error = std::current_exception();
        }
        next.store(n);
      }
    }
  }
};

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::vector<Job*> jobs;  // with ranges left, as far as is known; the oldest first
  bool stopping = false;
  bool started = false;
  std::vector<std::jthread> helpers;  // last, so that they end before what they use

  ~State() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    work.notify_all();
  }

  // The mutex is held.
  void start(int count) {
    if (started) {
      return;
    }
    started = true;
    try {
      for (int i = 0; i < count; ++i) {
        helpers.emplace_back([this] { help(); });
      }
    } catch (const std::system_error&) {
      // No more threads to be had: those that there are, and the caller, do the work.
    }
  }

  void help() {
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [this] { return stopping || !jobs.empty(); });
      if (stopping) {
        return;
      }
      Job* job = jobs.front();
      ++job->helpers;
      lock.unlock();
      job->work();
      lock.lock();
      std::erase(jobs, job);
      if (--job->helpers == 0) {
        done.notify_all();
      }
    }
  }
};

ThreadPool::ThreadPool(int threads)
    : threads_(threads), process_(getpid()), state_(std::make_unique<State>()) {
  if (threads < 1) {
    throw std::invalid_argument("threads: expected at least 1, got " + std::to_string(threads));
  }
}

ThreadPool::~ThreadPool() {
  if (forked()) {
    // The helpers are not in this process, and the mutex may be locked for ever: give both up.
    static_cast<void>(state_.release());
  }
}

bool ThreadPool::forked() const { return process_ != getpid(); }

void ThreadPool::run(std::int64_t n, std::int64_t grain, void* context, Body body) {
  grain = std::max<std::int64_t>(grain, 1);
  if (n <= 0) {
    return;
  }
  if (n <= grain || threads_ == 1 || forked()) {
    body(context, 0, n);
    return;
  }
  const std::int64_t ranges = kRangesPerThread * threads_;
  Job job{body, context, n, std::max(grain, n / ranges + (n % ranges != 0))};
  {
    std::lock_guard lock(state_->mutex);
    state_->start(threads_ - 1);
    state_->jobs.push_back(&job);
  }
  state_->work.notify_all();
  job.work();
  {
    std::unique_lock lock(state_->mutex);
    std::erase(state_->jobs, &job);
    state_->done.wait(lock, [&job] { return job.helpers == 0; });
  }
  if (job.error) {
    std::rethrow_exception(job.error);
  }
}

ThreadPool& ThreadPool::shared() {
  ThreadPool* pool = shared_pool.load();
  if (pool == nullptr || pool->forked()) {
    // The pool of a forked process's parent stays as it is: a thread that does not exist here may
    // hold its mutex.
    auto fresh = std::make_unique<ThreadPool>(cores());  // starts nothing yet
    if (shared_pool.compare_exchange_strong(pool, fresh.get())) {
      pool = fresh.release();
    }
  }
  return *pool;
}

int ThreadPool::cores() {
  // The mask is as long as the kernel's, which may be longer than the 1024 cores of cpu_set_t.
  for (int room = CPU_SETSIZE; room <= (1 << 20); room *= 2) {
    const std::size_t bytes = CPU_ALLOC_SIZE(room);
    cpu_set_t* mask = CPU_ALLOC(room);
    if (mask == nullptr) {
      break;
    }
    const bool known = sched_getaffinity(0, bytes, mask) == 0;
    const bool too_short = !known && errno == EINVAL;
    const int count = known ? CPU_COUNT_S(bytes, mask) : 1;
    CPU_FREE(mask);
    if (!too_short) {
      return std::max(count, 1);
    }
  }
  return 1;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
