// Mailbox: how the driver and one worker process talk, by one system call for each message.
//
// A few pages of shared memory hold sequence numbers, each on a cache line of its own, and a ring
// of short messages for each direction. The driver asks, number 1, 2, ...; the worker answers each
// in that order. They are numbers and not flags, so that nothing old is mistaken for something new.
// A hand-over costs about 8 us if the other side sleeps (futex), otherwise less than 1 us: the
// system call that wakes a sleeper is made in either case. Neither side spins, which would take
// time from working processes when there are as many processes as cores.
//
// In the child of a fork, each method that changes a mailbox or a bell throws std::runtime_error.
//
// Many workers ring one Bell, on which their driver sleeps, or knock, see there. Whatever waits
// does so for a given time at most and also returns when a signal arrives: look after the other
// side's life, and wait again.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pycollect/detail/process.h"
#include "pycollect/detail/shared_number.h"
#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

using Seconds = std::chrono::duration<double>;
using Message = std::vector<std::byte>;

// What all workers of a driver ring. Who only wants to be served knocks, and is not counted among
// those who ring, so that a driver that serves while it waits sees which of both it was.
// Thread-safe. A knock that nobody waits for yet costs no system call.
class Bell {
 public:
  // A new one; throws as share_memory() does.
  Bell();
  // Another process's; throws as attach_memory() does.
  explicit Bell(const SharedAddress& address);

  const SharedAddress& address() const { return *memory_->address(); }
  // How often it was rung.
  std::uint64_t count() const;
  void ring();
  // Sleeps until count() is no longer `seen`; returns whether it is not.
  bool wait_ring(std::uint64_t seen, Seconds timeout) const;

  // A ring, or an urgent knock, counts as so many knocks: nobody waits for more.
  static constexpr std::uint64_t kUrgent = 1024;

  // How many knocks there were.
  std::uint64_t knocks() const;
  void knock(std::uint64_t times = 1);
  // Sleeps until there are `number` knocks more than `heard`; returns whether there are. For one
  // thread at a time, of all processes.
  bool wait_knock(std::uint64_t heard, Seconds timeout, std::uint64_t number = 1) const;

 private:
  std::shared_ptr<Memory> memory_;
  OwningProcess owner_;
};

// The sizes of a mailbox. What is longer has to go another way. An answer has room for the states
// of torch's, numpy's and Python's random generators (12 kB), which come with each rollout of a
// seeded worker; those of a worker with processes of its own are longer.
inline constexpr std::size_t kAskBytes = 496;
inline constexpr std::size_t kAnswerBytes = 16368;

struct MailboxPages;  // in shared memory, see mailbox.cpp

// The driver's end. One thread at a time, but for stop(), which any may call.
class Mailbox {
 public:
  // With room for `capacity` questions whose answers were not taken yet. Throws as share_memory().
  explicit Mailbox(std::int64_t capacity);

  const SharedAddress& address() const { return *memory_->address(); }

  // Asks for something and returns the question's number, from 1. Throws std::length_error past
  // kAskBytes and std::logic_error where there is no room.
  std::uint64_t ask(std::span<const std::byte> message);
  std::uint64_t asked() const { return asked_; }
  // How many of them were answered, whether or not that was taken.
  std::uint64_t answered() const;
  // Whether the oldest question whose answer was not taken has one.
  bool has_answer() const;
  // That answer. Throws std::logic_error if there is none.
  Message take_answer();
  // The rollouts of all questions up to that number are to end after their current step. Never goes
  // back. Costs the worker nothing.
  void stop(std::uint64_t number);
  // Puts a message where the worker finds it whenever it looks, in the place of the one before it.
  // Throws std::length_error past kAskBytes.
  void publish(std::span<const std::byte> message);
  // What the worker counts up with each step; see WorkerMailbox::steps().
  std::uint64_t steps() const;

 private:
  MailboxPages& pages() const;
  std::shared_ptr<Memory> memory_;
  OwningProcess owner_;
  std::uint64_t asked_ = 0;
  std::uint64_t taken_ = 0;
};

// The worker's end, for one thread.
class WorkerMailbox {
 public:
  // Throws as attach_memory() does, and std::invalid_argument where there is no mailbox.
  WorkerMailbox(const SharedAddress& mailbox, const SharedAddress& bell);

  // Sleeps until there is a question that was not answered; returns whether there is.
  bool wait_ask(Seconds timeout) const;
  // The oldest question; it stays until it is answered. Throws std::logic_error if there is none.
  Message question() const;
  // That question's number.
  std::uint64_t number() const { return answered_ + 1; }
  // Answers it, and rings. Throws std::length_error past kAnswerBytes and std::logic_error without
  // a question.
  void answer(std::span<const std::byte> message);
  // The message that was published last, whole; empty before the first.
  Message published() const;
  // Up to which question rollouts are to end; see Mailbox::stop().
  SharedNumber stop() const;
  // What a recorder counts up with each step, so that the driver sees that something happens.
  SharedNumber steps() const;

 private:
  MailboxPages& pages() const;
  std::shared_ptr<Memory> memory_;
  OwningProcess owner_;
  Bell bell_;
  std::uint64_t answered_ = 0;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
