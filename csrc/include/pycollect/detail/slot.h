// Slot: how a worker asks a server again and again, and sleeps until each answer.
//
// A page of shared memory with two numbers, each on a cache line of its own, and room for a short
// message in each direction. Mostly messages are empty: what a question is about lies in other
// memory that both have mapped, and which belongs to the worker but between question and answer.
// Who takes a dead worker's place goes on with its slot.
//
// Many workers ring the one Bell on which their server sleeps. Waits end as a Mailbox's do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "pycollect/detail/mailbox.h"
#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// What is longer has to go another way.
inline constexpr std::size_t kSlotBytes = 496;

struct SlotPage;  // in shared memory, see slot.cpp

// The server's end, for one thread at a time.
class ServerSlot {
 public:
  // Throws as share_memory() does.
  ServerSlot();

  const SharedAddress& address() const { return *memory_->address(); }
  // Whether there is a question that was not answered.
  bool has_question() const;
  // That question. Throws std::logic_error if there is none.
  Message question();
  // Answers it, with a number beside the message, and wakes the worker. Throws std::length_error
  // past kSlotBytes and std::logic_error without a question.
  void answer(std::span<const std::byte> message, std::uint64_t note);

 private:
  SlotPage& page() const;
  std::shared_ptr<Memory> memory_;
};

// The worker's end, for one thread.
class WorkerSlot {
 public:
  // Throws as attach_memory() does, and std::invalid_argument where there is no slot.
  WorkerSlot(const SharedAddress& slot, const SharedAddress& bell);

  // Asks, and rings. Throws std::length_error past kSlotBytes and std::logic_error while the
  // question before was not answered.
  void ask(std::span<const std::byte> message);
  // Sleeps until the question is answered; returns whether it is.
  bool wait_answer(Seconds timeout) const;
  // The answer to the last question, and the number beside it. Throw std::logic_error where it was
  // not answered.
  Message answer() const;
  std::uint64_t note() const;

 private:
  SlotPage& page() const;
  void check_answered() const;
  std::shared_ptr<Memory> memory_;
  Bell bell_;
  std::uint64_t asked_ = 0;  // the number of the own last question; 0: none yet
};

}  // namespace pycollect::inline PYCOLLECT_ABI
