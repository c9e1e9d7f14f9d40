// Slots: requests of workers to an inference server, and the server's answers.
//
// Each worker has one slot, or one per group of its environments. A slot is two numbers in shared
// memory, on separate cache lines, and space for a short message in each direction. Most messages
// are empty: the data of a request is in other memory that both processes have mapped. This memory
// belongs to the server between request and answer, and to the worker otherwise. A replacement of a
// dead worker continues with its slot; a replacement of a server continues with all of its slots.
//
// All workers knock at the Bell on which their server sleeps. Waits end as described in mailbox.h.
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

// Longer messages must be sent another way.
inline constexpr std::size_t kSlotBytes = 496;

// The maximum number of slots of a server.
inline constexpr std::size_t kMostSlots = 1024;

struct SlotTable;  // in shared memory, see slot.cpp
struct SlotPage;

// The server's end of all slots, for one thread at a time. The process that created the slots may
// add slots while a server in another process, which has attached them, answers.
class ServerSlots {
 public:
  // Creates memory without slots. Throws as share_memory() does.
  ServerSlots();
  // Attaches the slots of another process. Throws as attach_memory() does, and
  // std::invalid_argument if the address is not that of slots.
  explicit ServerSlots(const SharedAddress& address);

  const SharedAddress& address() const { return *memory_->address(); }
  // The number of slots. They are numbered from 0.
  std::size_t count() const;
  // Adds a slot and returns its number. Throws std::length_error if there are kMostSlots already.
  std::size_t add();
  // Returns the slots with an unanswered request, in order. The following methods refer to these
  // requests: the replacement of a dead worker may have made another one since.
  std::vector<std::size_t> asking();
  // The slots among them with a message that is not empty.
  std::vector<std::size_t> with_message() const;
  // The message of a request, or nothing if the replacement of a dead worker has made another
  // request. Throws std::logic_error if asking() found none.
  std::optional<Message> question(std::size_t slot) const;
  // When the request was made, in seconds of the steady clock, which all processes of a machine
  // share. Throws std::logic_error if asking() found none.
  double asked_at(std::size_t slot) const;
  // Answers a request with a message and a number, and wakes the worker. Throws std::length_error
  // for messages longer than kSlotBytes, and std::logic_error if asking() found no request or if it
  // was answered already.
  void answer(std::size_t slot, std::span<const std::byte> message, std::uint64_t note);
  // Answers all of these requests with this number and an empty message, and wakes the workers
  // together. Throws as answer() does, and then answers none of them.
  void answer_all(std::span<const std::size_t> slots, std::uint64_t note);

 private:
  SlotTable& table() const;
  SlotPage& page_asking(std::size_t slot) const;
  bool is_asking(std::size_t slot) const;
  void write_answer(std::size_t slot, std::span<const std::byte> message, std::uint64_t note);
  void wake(std::uint32_t bits);
  std::shared_ptr<Memory> memory_;
  OwningProcess owner_;
  // for each slot, the number of the request that asking() found
  std::vector<std::uint64_t> found_;
};

// The worker's end of one slot, for one thread.
class WorkerSlot {
 public:
  // Throws as attach_memory() does, and std::invalid_argument if the slot does not exist.
  WorkerSlot(const SharedAddress& slots, std::size_t slot, const SharedAddress& bell);

  // Makes a request and knocks; the knock is urgent if there is a message. Throws std::length_error
  // for messages longer than kSlotBytes, and std::logic_error if the previous request was not
  // answered.
  void ask(std::span<const std::byte> message);
  // Sleeps until the request is answered. Returns whether it is.
  bool wait_answer(Seconds timeout) const;
  // The message and the number of the last answer. Throw std::logic_error if the request was not
  // answered.
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
  std::uint64_t asked_ = 0;  // the number of this object's last request; 0 before the first
};

}  // namespace pycollect::inline PYCOLLECT_ABI
