#include "pycollect/detail/collection.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "collector_worker.h"
#include "pycollect/assemble.h"
#include "pycollect/slab_pool.h"
#include "pycollect/worker_error.h"

namespace pycollect::inline PYCOLLECT_ABI::detail {
namespace {

// Text of the exception that is being handled.
std::string text_of_current() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

[[noreturn]] void rethrow_of(std::int64_t worker, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (...) {
    std::throw_with_nested(WorkerError(worker, text_of_current()));
  }
}

void check(const char* name, std::int64_t value) {
  if (value < 1) {
    throw std::invalid_argument(std::string(name) + ": expected at least 1, got " +
                                std::to_string(value));
  }
}

CollectorOptions checked(const CollectorOptions& options) {
  check("workers", options.workers);
  check("envs", options.envs);
  check("steps", options.steps);
  return options;
}

}  // namespace

// Not in an unnamed namespace: in a unity build, compilers warn about members of such types.

// Result of an order.
struct Answer {
  std::shared_ptr<Slab> slab;
  std::vector<Batch::Episode> episodes;
  std::exception_ptr error;
  bool complete = false;  // false if the rollout failed or was stopped
};

// A worker with its pending order and answer. The mutex of the state guards the members that
// change.
struct WorkerEntry {
  std::unique_ptr<Worker> worker;
  std::optional<Order> order;    // the worker's thread takes it
  std::optional<Answer> answer;  // next() takes it
  bool asked = false;            // between ask() and taken()
  std::thread::id thread;        // that runs the worker now
  Ledger ledger;
};

struct Collection::State {
  explicit State(const CollectorOptions& given) : options(checked(given)) {}

  std::int64_t frames() const { return options.envs * options.steps; }
  bool is_sync() const { return options.ready == Ready::all; }

  void make_workers(const MakeEnvironments& make);
  void start_threads();
  void serve(WorkerEntry& entry, std::int64_t w);
  void carry_out(WorkerEntry& entry, std::unique_lock<std::mutex>& lock);
  Answer answer(WorkerEntry& entry, Order order) const;
  void ask(std::int64_t w, std::shared_ptr<Slab> target, std::int64_t row);
  // Takes the answer of a worker that has one. Throws its error if the rollout failed.
  Answer taken(std::int64_t w);
  Batch delivered(const std::shared_ptr<Slab>& whole, std::vector<Batch::Episode> ended);
  Batch next_of_all();
  Batch next_of_first();
  void expect_running() const;
  void expect_outside(const char* call) const;
  void lose(WorkerEntry& entry);

  const CollectorOptions options;
  const pid_t process = getpid();
  std::deque<WorkerEntry> entries;
  std::optional<SlabPool> pool;
  TrajectoryIds ids;
  std::size_t ids_leaf = 0;  // index of the ids' leaf in the layout

  std::mutex turn;  // next() and stop() hold it throughout
  mutable std::mutex mutex;
  std::condition_variable ordered, answered;
  std::atomic<bool> stopping{false};
  std::shared_ptr<const Version> version;
  std::deque<std::int64_t> answers;  // workers in the order of completion
  std::vector<std::jthread> threads;

  // With Ready::all: the current batch, and flags of its complete rows.
  std::shared_ptr<Slab> slab;
  std::vector<std::uint8_t> complete;
  std::vector<std::vector<Batch::Episode>> episodes;  // by row
};

Collection::Collection(const CollectorOptions& options, const MakeEnvironments& make,
                       AnyPolicy policy)
    : state_(std::make_unique<State>(options)) {
  state_->version = std::make_shared<const Version>(Version{0, std::move(policy)});
  state_->make_workers(make);
  state_->start_threads();
}

Collection::~Collection() { stop(); }

void Collection::State::make_workers(const MakeEnvironments& make) {
  for (std::int64_t w = 0; w < options.workers; ++w) {
    std::unique_ptr<AnyEnvBatch> environments;
    try {
      environments = make(w);
    } catch (...) {
      rethrow_of(w, std::current_exception());
    }
    WorkerEntry& entry = entries.emplace_back();
    entry.worker =
        std::make_unique<Worker>(options, w, std::move(environments), version->policy.outputs);
    if (entry.worker->layout().fingerprint() != entries.front().worker->layout().fingerprint()) {
      throw std::invalid_argument(
          "make: expected the same leaves for all workers, but those of worker " +
          std::to_string(w) + " differ from those of worker 0");
    }
  }
  const std::int64_t rows = is_sync() ? options.workers : 1;
  const std::int64_t kept = is_sync() ? 2 : options.workers + 1;
  const Layout& layout = entries.front().worker->layout();
  pool.emplace(Placement(layout, {rows, options.envs, options.steps}), kept, false);
  ids_leaf = static_cast<std::size_t>(layout.find("collector.traj_ids"));
  complete.resize(entries.size());
  episodes.resize(entries.size());
}

// With Ready::all, the thread that calls next() waits for the other workers anyway, so it runs
// worker 0.
void Collection::State::start_threads() {
  try {
    for (std::size_t w = is_sync() ? 1 : 0; w < entries.size(); ++w) {
      threads.emplace_back([this, w] { serve(entries[w], static_cast<std::int64_t>(w)); });
    }
  } catch (...) {  // out of threads: end those that have started
    const std::lock_guard lock(mutex);
    stopping = true;
    ordered.notify_all();
    throw;
  }
}

void Collection::State::serve(WorkerEntry& entry, std::int64_t w) {
  std::unique_lock lock(mutex);
  for (;;) {
    ordered.wait(lock, [&] { return stopping || entry.order; });
    if (stopping) {
      return;
    }
    carry_out(entry, lock);
    answers.push_back(w);
    answered.notify_all();
  }
}

// Runs the worker in this thread. `lock` holds the mutex, except while the worker collects.
void Collection::State::carry_out(WorkerEntry& entry, std::unique_lock<std::mutex>& lock) {
  Order order = *std::exchange(entry.order, std::nullopt);
  entry.thread = std::this_thread::get_id();
  lock.unlock();
  Answer result = answer(entry, std::move(order));
  lock.lock();
  entry.thread = {};
  entry.answer = std::move(result);
}

Answer Collection::State::answer(WorkerEntry& entry, Order order) const {
  Answer result;
  result.slab = order.slab;
  try {
    if (auto ended = entry.worker->collect(std::move(order), stopping)) {
      result.episodes = std::move(*ended);
      result.complete = true;
    }
  } catch (...) {
    result.error = std::current_exception();
  }
  return result;
}

// Requires the mutex.
void Collection::State::ask(std::int64_t w, std::shared_ptr<Slab> target, std::int64_t row) {
  WorkerEntry& entry = entries[static_cast<std::size_t>(w)];
  entry.order = Order{std::move(target), row, version};
  entry.asked = true;
  entry.ledger.issued += frames();
  entry.ledger.in_flight += frames();
}

void Collection::State::lose(WorkerEntry& entry) {
  entry.ledger.lost += entry.ledger.in_flight;
  entry.ledger.in_flight = 0;
}

Answer Collection::State::taken(std::int64_t w) {
  WorkerEntry& entry = entries[static_cast<std::size_t>(w)];
  Answer answer = *std::exchange(entry.answer, std::nullopt);
  entry.asked = false;
  if (!answer.complete) {
    lose(entry);
  }
  if (answer.error) {
    rethrow_of(w, answer.error);
  }
  expect_running();
  return answer;
}

void Collection::State::expect_running() const {
  if (stopping) {
    throw std::logic_error("next: the collector was stopped; make a new one");
  }
}

// Throws if an environment or the policy calls, because its worker would wait for itself.
void Collection::State::expect_outside(const char* call) const {
  const std::lock_guard lock(mutex);
  for (const WorkerEntry& entry : entries) {
    if (entry.thread == std::this_thread::get_id()) {
      throw std::logic_error(std::string(call) +
                             ": expected a call outside of the collector's workers, got one from "
                             "an environment or the policy");
    }
  }
}

Batch Collection::next() {
  if (getpid() != state_->process) {  // its threads do not exist here, and would never answer
    throw std::runtime_error("next: the collector belongs to process " +
                             std::to_string(state_->process) +
                             ", but a forked child called it; make a new one in the child");
  }
  state_->expect_outside("next");
  const std::lock_guard turn(state_->turn);
  state_->expect_running();
  return state_->is_sync() ? state_->next_of_all() : state_->next_of_first();
}

Batch Collection::State::next_of_all() {
  std::unique_lock lock(mutex);
  if (!slab) {
    slab = pool->acquire();
    std::fill(complete.begin(), complete.end(), std::uint8_t{0});
  }
  for (std::size_t w = 0; w < entries.size(); ++w) {
    if (complete[w] == 0 && !entries[w].asked) {
      ask(static_cast<std::int64_t>(w), slab, static_cast<std::int64_t>(w));
    }
  }
  ordered.notify_all();
  if (entries.front().order) {  // worker 0 has no thread
    carry_out(entries.front(), lock);
  }
  // Wait for all workers, even if one has failed: none may collect between calls.
  answered.wait(lock, [&] {
    return stopping || std::all_of(entries.begin(), entries.end(),
                                   [](const WorkerEntry& s) { return !s.asked || s.answer; });
  });
  for (std::size_t w = 0; w < entries.size(); ++w) {
    if (complete[w] == 0) {
      expect_running();
      episodes[w] = taken(static_cast<std::int64_t>(w)).episodes;
      complete[w] = 1;
    }
  }
  answers.clear();
  std::vector<Batch::Episode> ended = std::exchange(episodes.front(), {});
  for (std::vector<Batch::Episode>& of_one : std::span(episodes).subspan(1)) {
    ended.insert(ended.end(), of_one.begin(), of_one.end());
    of_one.clear();
  }
  return delivered(std::exchange(slab, nullptr), std::move(ended));
}

Batch Collection::State::next_of_first() {
  std::unique_lock lock(mutex);
  for (std::size_t w = 0; w < entries.size(); ++w) {
    if (!entries[w].asked) {
      ask(static_cast<std::int64_t>(w), pool->acquire(), 0);
    }
  }
  ordered.notify_all();
  answered.wait(lock, [&] { return !answers.empty() || stopping; });
  expect_running();
  std::shared_ptr<Slab> target = pool->acquire();  // may throw, so before the answer is taken
  const std::int64_t w = answers.front();
  answers.pop_front();
  Answer done = taken(w);
  ask(w, std::move(target), 0);
  ordered.notify_all();
  return delivered(done.slab, std::move(done.episodes));
}

// Makes the trajectory ids unique over the whole run, and counts the batch in the ledger. Requires
// the mutex.
Batch Collection::State::delivered(const std::shared_ptr<Slab>& whole,
                                   std::vector<Batch::Episode> ended) {
  Batch batch(whole, std::move(ended));
  for (std::int64_t row = 0; row < batch.geometry().workers; ++row) {
    const std::int64_t w = batch.header(row).worker;
    ids.renumber(w, whole->rows(ids_leaf, row), TrajectoryIds::Known::counting);
    Ledger& ledger = entries[static_cast<std::size_t>(w)].ledger;
    ledger.delivered += frames();
    ledger.in_flight -= frames();
  }
  return batch;
}

void Collection::set_policy(AnyPolicy policy) {
  const std::lock_guard lock(state_->mutex);
  if (policy.outputs != state_->version->policy.outputs) {
    throw std::invalid_argument(
        "policy: expected the same outputs as the previous policy, got different ones");
  }
  const std::int64_t number = state_->version->number + 1;
  state_->version = std::make_shared<const Version>(Version{number, std::move(policy)});
}

Ledger Collection::ledger(std::int64_t worker) const {
  const std::lock_guard lock(state_->mutex);
  if (worker < 0 || worker >= state_->options.workers) {
    throw std::out_of_range("worker: expected 0 to " + std::to_string(state_->options.workers - 1) +
                            ", got " + std::to_string(worker));
  }
  return state_->entries[static_cast<std::size_t>(worker)].ledger;
}

Ledger Collection::ledger() const {
  const std::lock_guard lock(state_->mutex);
  Ledger sum;
  for (const WorkerEntry& entry : state_->entries) {
    sum.issued += entry.ledger.issued;
    sum.delivered += entry.ledger.delivered;
    sum.in_flight += entry.ledger.in_flight;
    sum.lost += entry.ledger.lost;
  }
  return sum;
}

void Collection::stop() {
  state_->expect_outside("stop");
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->ordered.notify_all();
    state_->answered.notify_all();
  }
  const std::lock_guard turn(state_->turn);
  state_->threads.clear();  // joins the threads
  const std::lock_guard lock(state_->mutex);
  for (WorkerEntry& entry : state_->entries) {
    entry.answer.reset();
    entry.order.reset();
    state_->lose(entry);
  }
  state_->slab.reset();
}

const Layout& Collection::layout() const { return state_->entries.front().worker->layout(); }

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
