// Slots: how workers ask a server again and again, and sleep until each answer.
//
// Each worker has one, or one for each group of its environments: two numbers in shared memory, on
// cache lines of their own, and room for a short message in each direction. Mostly messages are
// empty: what a question is about lies in other memory that both have mapped, and which belongs to
// the worker but between question and answer. Who takes a dead worker's place goes on with its
// slot, and so does a server with all of them.
//
// All workers knock at the one Bell on which their server sleeps. Waits end as a Mailbox's do.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pycollect/detail/mailbox.h"
#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// What is longer has to go another way.
inline constexpr std::size_t kSlotBytes = 496;

// More cannot ask one server.
inline constexpr std::size_t kMostSlots = 1024;

struct SlotTable;  // in shared memory, see slot.cpp
struct SlotPage;

// The server's end of all slots, for one thread at a time. Whoever made them may add to them while
// a server in another process, which has attached them, answers.
class ServerSlots {
 public:
  // None yet. Throws as share_memory() does.
  ServerSlots();
  // Another process's. Throws as attach_memory() does, and std::invalid_argument where there are
  // none.
  explicit ServerSlots(const SharedAddress& address);

  const SharedAddress& address() const { return *memory_->address(); }
  // How many there are. They are numbered from 0.
  std::size_t count() const;
  // Makes one more, and returns its number. Throws std::length_error past kMostSlots.
  std::size_t add();
  // Those with a question that was not answered, in their order. What follows is about these
  // questions: who takes a dead worker's place may have asked another one meanwhile.
  std::vector<std::size_t> asking();
  // Those of them whose question is more than an empty message.
  std::vector<std::size_t> with_message() const;
  // That question, or nothing if the replacement of a dead worker has asked another one. Throws
  // std::logic_error if asking() found none.
  std::optional<Message> question(std::size_t slot) const;
  // Answers it, with a number beside the message, and wakes the worker. Throws std::length_error
  // past kSlotBytes and std::logic_error if asking() found none, or it was answered.
  void answer(std::size_t slot, std::span<const std::byte> message, std::uint64_t note);
  // Answers all of these with that number and nothing else, or none of them, and wakes their
  // workers at once; throws likewise.
  void answer_all(std::span<const std::size_t> slots, std::uint64_t note);

 private:
  SlotTable& table() const;
  SlotPage& page_asking(std::size_t slot) const;
  bool is_asking(std::size_t slot) const;
  void write_answer(std::size_t slot, std::span<const std::byte> message, std::uint64_t note);
  void wake(std::uint32_t bits);
  std::shared_ptr<Memory> memory_;
  OwningProcess owner_;
  std::vector<std::uint64_t> found_;  // the number of each slot's question that asking() found
};

// The worker's end of one, for one thread.
class WorkerSlot {
 public:
  // Throws as attach_memory() does, and std::invalid_argument where there is no such slot.
  WorkerSlot(const SharedAddress& slots, std::size_t slot, const SharedAddress& bell);

  // Asks, and knocks, urgently where there is a message. Throws std::length_error past kSlotBytes
  // and std::logic_error while the question before was not answered.
  void ask(std::span<const std::byte> message);
  // Sleeps until the question is answered; returns whether it is.
  bool wait_answer(Seconds timeout) const;
  // The answer to the last question, and the number beside it. Throw std::logic_error where it was
  // not answered.
  Message answer() const;
  std::uint64_t note() const;

 private:
  SlotPage& page() const { return *page_; }
  bool is_answered() const;
  void check_answered() const;
  std::shared_ptr<Memory> memory_;
  OwningProcess owner_;
  SlotPage* page_;
  const std::atomic<std::uint64_t>* answers_;
  std::uint32_t bit_;
  Bell bell_;
  std::uint64_t asked_ = 0;  // the number of the own last question; 0: none yet
};

}  // namespace pycollect::inline PYCOLLECT_ABI
