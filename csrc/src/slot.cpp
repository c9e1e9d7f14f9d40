#include "pycollect/detail/slot.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>
#include <string>

#include "futex.h"
#include "pycollect/shared_memory.h"

namespace pycollect::inline PYCOLLECT_ABI {

namespace {

struct SlotMessage {
  std::uint64_t length = 0;
  std::byte bytes[kSlotBytes];

  void write(std::span<const std::byte> message) {
    if (message.size() > kSlotBytes) {
      throw std::length_error("message: expected at most " + std::to_string(kSlotBytes) +
                              " bytes, got " + std::to_string(message.size()));
    }
    length = message.size();
    std::copy(message.begin(), message.end(), bytes);
  }

  Message read() const {
    const std::uint64_t size = length;  // once: the other process could change it
    if (size > kSlotBytes) {
      throw std::runtime_error("slot: expected a message of at most " + std::to_string(kSlotBytes) +
                               " bytes, got " + std::to_string(size));
    }
    return {bytes, bytes + size};
  }
};

}  // namespace

struct SlotPage {
  static constexpr std::uint64_t kMagic = 0x313074746f6c5300ULL;  // "\0Slott01"

  std::uint64_t magic = kMagic;
  alignas(64) std::atomic<std::uint64_t> asked{};
  alignas(64) std::atomic<std::uint64_t> answered{};
  std::atomic<std::uint64_t> note{};
  alignas(64) SlotMessage question;
  alignas(64) SlotMessage answer;
};

namespace {

SlotPage& page_in(const Memory& memory) { return *reinterpret_cast<SlotPage*>(memory.data()); }

}  // namespace

ServerSlot::ServerSlot() : memory_(share_memory(sizeof(SlotPage))) {
  new (memory_->data()) SlotPage();
}

SlotPage& ServerSlot::page() const { return page_in(*memory_); }

bool ServerSlot::has_question() const {
  return page().asked.load(std::memory_order_acquire) !=
         page().answered.load(std::memory_order_relaxed);
}

Message ServerSlot::question() {
  if (!has_question()) {
    throw std::logic_error("question: expected one, there is none");
  }
  return page().question.read();
}

void ServerSlot::answer(std::span<const std::byte> message, std::uint64_t note) {
  if (!has_question()) {
    throw std::logic_error("answer: expected a question, there is none");
  }
  SlotPage& to = page();
  to.answer.write(message);
  to.note.store(note, std::memory_order_relaxed);
  to.answered.store(to.asked.load(std::memory_order_relaxed), std::memory_order_release);
  futex::wake_all(to.answered);
}

WorkerSlot::WorkerSlot(const SharedAddress& slot, const SharedAddress& bell)
    : memory_(attach_memory(slot)), bell_(bell) {
  if (static_cast<std::size_t>(memory_->bytes()) < sizeof(SlotPage) ||
      page().magic != SlotPage::kMagic) {
    throw std::invalid_argument("slot: expected the address of one, got other memory");
  }
}

SlotPage& WorkerSlot::page() const { return page_in(*memory_); }

void WorkerSlot::ask(std::span<const std::byte> message) {
  SlotPage& to = page();
  const std::uint64_t before = to.asked.load(std::memory_order_relaxed);
  // The question of a worker that died may stand there for ever.
  if (asked_ != 0 && to.answered.load(std::memory_order_acquire) != before) {
    throw std::logic_error("ask: expected the question before to be answered");
  }
  to.question.write(message);
  asked_ = before + 1;
  to.asked.store(asked_, std::memory_order_release);
  bell_.ring();
}

bool WorkerSlot::wait_answer(Seconds timeout) const {
  const auto& answered = page().answered;
  const std::uint64_t seen = answered.load(std::memory_order_acquire);
  if (seen == asked_) {
    return true;
  }
  futex::wait(answered, seen, timeout);
  return answered.load(std::memory_order_acquire) == asked_;
}

Message WorkerSlot::answer() const {
  check_answered();
  return page().answer.read();
}

std::uint64_t WorkerSlot::note() const {
  check_answered();
  return page().note.load(std::memory_order_relaxed);
}

void WorkerSlot::check_answered() const {
  if (asked_ == 0 || page().answered.load(std::memory_order_acquire) != asked_) {
    throw std::logic_error("answer: expected one to the last question, there is none");
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
