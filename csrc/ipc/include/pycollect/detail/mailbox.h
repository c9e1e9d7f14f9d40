// Mailbox: messages between the driver and one worker process, with one system call per message.
//
// A mailbox is a few pages of shared memory. They contain sequence numbers, each on its own cache
// line, and a ring of short messages for each direction. The driver asks questions 1, 2, ...; the
// worker answers them in order. Numbers, unlike flags, cannot be mistaken for older ones. A
// hand-over takes about 8 us if the receiver sleeps (futex), otherwise less than 1 us. The system
// call that wakes a sleeper is made in either case. Neither side spins: with as many processes as
// cores, this would slow down processes that work.
//
// In the child of a fork, each method that changes a mailbox or a bell throws std::runtime_error.
//
// The workers of a driver share one Bell, on which the driver sleeps. Every wait has a timeout and
// also returns when a signal arrives. Then check that the other side is alive, and wait again.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pycollect/detail/owning_process.h"
#include "pycollect/detail/shared_number.h"
#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

using Seconds = std::chrono::duration<double>;
using Message = std::vector<std::byte>;

// The signal of all workers to their driver. Workers ring when they have an answer and knock when
// they need to be served. Knocks do not change count(), so a driver that serves while it waits can
// tell the two apart. Thread-safe. A knock costs no system call if no thread waits for it yet.
class Bell {
 public:
  // Creates a bell. Throws as share_memory() does.
  Bell();
  // Attaches the bell of another process. Throws as attach_memory() does, and std::invalid_argument
  // if the memory is too small for a bell.
  explicit Bell(const SharedAddress& address);

  const SharedAddress& address() const { return *memory_->address(); }
  // The number of rings so far.
  std::uint64_t count() const;
  void ring();
  // Sleeps until count() differs from `seen`. Returns whether it does.
  bool wait_ring(std::uint64_t seen, Seconds timeout) const;
  // Rings when the process `pid` is gone. If no thread can be started for this, the driver notices
  // it only at the end of its wait.
  void ring_when_gone(int pid);

  // A ring or an urgent knock counts as this many knocks, so it ends every wait.
  static constexpr std::uint64_t kUrgent = 1024;

  // The number of knocks so far.
  std::uint64_t knocks() const;
  void knock(std::uint64_t times = 1);
  // Sleeps until knocks() exceeds `heard` by `number`. Returns whether it does. Only one thread of
  // all processes may wait at a time.
  bool wait_knock(std::uint64_t heard, Seconds timeout, std::uint64_t number = 1) const;

 private:
  std::shared_ptr<Memory> memory_;
  OwningProcess owner_;
};

// The sizes of a mailbox. Longer messages must be sent another way. An answer can hold the states
// of torch's, NumPy's and Python's random generators (12 kB), which come with each rollout of a
// seeded worker; a worker with several processes needs more.
inline constexpr std::size_t kAskBytes = 496;
inline constexpr std::size_t kAnswerBytes = 16368;

struct MailboxPages;  // in shared memory, see mailbox.cpp

// The driver's end. For one thread at a time, except for stop(), which any thread may call.
class Mailbox {
 public:
  // `capacity` is the maximum number of questions without a taken answer. Throws as share_memory()
  // does.
  explicit Mailbox(std::int64_t capacity);

  const SharedAddress& address() const { return *memory_->address(); }

  // Sends a question and returns its number, starting at 1. Throws std::length_error for messages
  // longer than kAskBytes and std::logic_error if the capacity is exhausted.
  std::uint64_t ask(std::span<const std::byte> message);
  std::uint64_t asked() const { return asked_; }
  // The number of answered questions, whether or not their answers were taken.
  std::uint64_t answered() const;
  // Whether the next answer can be taken.
  bool has_answer() const;
  // Returns the answer to the oldest question without a taken answer. Throws std::logic_error if it
  // was not answered.
  Message take_answer();
  // Ends the rollouts of all questions up to this number after their current step. The number never
  // decreases. Costs the worker nothing.
  void stop(std::uint64_t number);
  // Replaces the message that the worker can read at any time. Throws std::length_error for
  // messages longer than kAskBytes.
  void publish(std::span<const std::byte> message);
  // The number of steps that the worker has counted; see WorkerMailbox::steps().
  std::uint64_t steps() const;

 private:
  MailboxPages& pages() const;
  std::shared_ptr<Memory> memory_;
  OwningProcess owner_;
  std::uint64_t capacity_;
  std::uint64_t asked_ = 0;
  std::uint64_t taken_ = 0;
};

// The worker's end, for one thread.
class WorkerMailbox {
 public:
  // Throws as attach_memory() does, and std::invalid_argument if the address is not that of a
  // mailbox.
  WorkerMailbox(const SharedAddress& mailbox, const SharedAddress& bell);

  // Sleeps until there is an unanswered question. Returns whether there is one.
  bool wait_ask(Seconds timeout) const;
  // The oldest unanswered question. Throws std::logic_error if there is none.
  Message question() const;
  // The number of this question.
  std::uint64_t number() const { return answered_ + 1; }
  // Answers this question and rings the bell. Throws std::length_error for messages longer than
  // kAnswerBytes and std::logic_error without a question.
  void answer(std::span<const std::byte> message);
  // The message that was published last, complete; empty before the first.
  Message published() const;
  // The number of the last question for which the rollout must end; see Mailbox::stop().
  SharedNumber stop() const;
  // Incremented by a recorder with each step, so that the driver sees progress.
  SharedNumber steps() const;

 private:
  MailboxPages& pages() const;
  std::shared_ptr<Memory> memory_;
  OwningProcess owner_;
  Bell bell_;
  std::uint64_t capacity_ = 0;
  std::uint64_t answered_ = 0;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
