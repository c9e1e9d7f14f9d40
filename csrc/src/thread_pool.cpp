#include "pycollect/thread_pool.h"

#include <pthread.h>
#include <sched.h>

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

#include "pycollect/detail/process.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

// Ranges per thread: enough that one interrupted thread does not delay the others.
constexpr std::int64_t kRangesPerThread = 4;

std::atomic<ThreadPool*> shared_pool{nullptr};

// Registered when the library is loaded, before there is a pool. It uses only a lock-free atomic,
// as required in the child of a process with threads. The parent's pool stays untouched: a thread
// that does not exist in the child may have locked its mutex.
[[maybe_unused]] const int fork_handler_of_pools =
    pthread_atfork(nullptr, nullptr, [] { shared_pool.store(nullptr); });

}  // namespace

// A running loop, on the stack of its caller.
struct ThreadPool::Job {
  Body body;
  void* context;
  std::int64_t n;
  std::int64_t step;
  std::atomic<std::int64_t> next{0};
  int helpers = 0;  // helpers at work; guarded by the pool's mutex
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
  std::vector<Job*> jobs;  // that may have ranges left; oldest first
  bool stopping = false;
  bool started = false;
  std::vector<std::jthread> helpers;  // the last member, so that the threads end first

  ~State() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    work.notify_all();
  }

  // Requires the mutex.
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
      // Out of threads: the caller and the threads that have started do the work.
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
    : threads_(threads), epoch_(fork_epoch.load()), state_(std::make_unique<State>()) {
  if (threads < 1) {
    throw std::invalid_argument("threads: expected at least 1, got " + std::to_string(threads));
  }
}

ThreadPool::~ThreadPool() {
  if (forked()) {
    // The helpers do not exist in this process, and the mutex may be locked forever, so leak both.
    static_cast<void>(state_.release());
  }
}

bool ThreadPool::forked() const { return epoch_ != fork_epoch.load(std::memory_order_relaxed); }

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
  if (pool == nullptr) {
    auto fresh = std::make_unique<ThreadPool>(cores());  // starts no thread yet
    if (shared_pool.compare_exchange_strong(pool, fresh.get())) {
      pool = fresh.release();
    }
  }
  return *pool;
}

int ThreadPool::cores() {
  // The mask must have the kernel's size, which may exceed the 1024 cores of cpu_set_t.
  for (int size = CPU_SETSIZE; size <= (1 << 20); size *= 2) {
    const std::size_t bytes = CPU_ALLOC_SIZE(size);
    cpu_set_t* mask = CPU_ALLOC(size);
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
