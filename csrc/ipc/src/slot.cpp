#include "pycollect/detail/slot.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "futex.h"
#include "pycollect/shared_memory.h"

namespace pycollect::inline PYCOLLECT_ABI {

namespace {

static_assert(kSlotBytes % sizeof(std::uint64_t) == 0);

void check_length(std::span<const std::byte> message) {
  if (message.size() > kSlotBytes) {
    throw std::length_error("message: expected at most " + std::to_string(kSlotBytes) +
                            " bytes, got " + std::to_string(message.size()));
  }
}

void check_size(std::uint64_t size) {
  if (size > kSlotBytes) {
    throw std::runtime_error("slot: expected a message of at most " + std::to_string(kSlotBytes) +
                             " bytes, got " + std::to_string(size));
  }
}

}  // namespace

// Not in an unnamed namespace: in a unity build, compilers warn about members of such types.
struct SlotMessage {
  std::uint64_t length = 0;
  std::byte bytes[kSlotBytes];

  void write(std::span<const std::byte> message) {
    check_length(message);
    length = message.size();
    std::copy(message.begin(), message.end(), bytes);
  }

  Message read() const {
    const std::uint64_t size = length;  // read once: the other process could change it
    check_size(size);
    return {bytes, bytes + size};
  }
};

// A question and its number. The number changes before the bytes, because the replacement of a dead
// worker may write while the server reads.
struct SlotQuestion {
  std::atomic<std::uint64_t> number{};
  std::atomic<std::uint64_t> length{};
  std::atomic<std::uint64_t> words[kSlotBytes / sizeof(std::uint64_t)]{};

  // A reader that sees the new length or any new word also sees the new number, because each store
  // releases it.
  void write(std::uint64_t own, std::span<const std::byte> message) {
    check_length(message);
    number.store(own, std::memory_order_relaxed);
    length.store(message.size(), std::memory_order_release);
    for (std::size_t at = 0; at < message.size(); at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, message.data() + at, std::min(sizeof(word), message.size() - at));
      words[at / sizeof(word)].store(word, std::memory_order_release);
    }
  }

  // Returns nothing if the number has changed.
  std::optional<Message> read(std::uint64_t wanted) const {
    const std::uint64_t size = length.load(std::memory_order_acquire);
    check_size(size);
    Message message(size);
    for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
      const std::uint64_t word = words[at / sizeof(word)].load(std::memory_order_acquire);
      std::memcpy(message.data() + at, &word, std::min<std::size_t>(sizeof(word), size - at));
    }
    if (number.load(std::memory_order_relaxed) != wanted) {
      return std::nullopt;
    }
    return message;
  }
};

struct SlotPage {
  alignas(64) std::atomic<std::uint64_t> asked{};
  std::atomic<double> asked_at{};  // seconds of the steady clock
  alignas(64) std::atomic<std::uint64_t> answered{};
  std::atomic<std::uint64_t> note{};
  alignas(64) SlotQuestion question;
  alignas(64) SlotMessage answer;
};

struct SlotTable {
  static constexpr std::uint64_t kMagic = 0x353073746f6c5300ULL;  // "\0Slots05"

  std::uint64_t magic = kMagic;
  std::atomic<std::uint64_t> count{};
  // Number of answers. All workers sleep on this number, so one system call wakes all workers that
  // are answered together, before any of them takes the server's CPU.
  alignas(64) std::atomic<std::uint64_t> answers{};
  SlotPage pages[kMostSlots];
};

namespace {

static_assert(kMostSlots <= Bell::kUrgent, "a server may wait for a knock of each slot");

// The bit that wakes this slot's worker. With more than 32 slots, some share a bit; a worker that
// is woken for another slot checks its own slot and sleeps again.
std::uint32_t bit_of(std::size_t slot) { return std::uint32_t{1} << (slot % 32); }

SlotTable& table_in(const Memory& memory) {
  if (static_cast<std::size_t>(memory.bytes()) < sizeof(SlotTable)) {
    throw std::invalid_argument(
        "slots: expected the address of a server's slots, got other memory");
  }
  auto& table = *reinterpret_cast<SlotTable*>(memory.data());
  if (table.magic != SlotTable::kMagic) {
    throw std::invalid_argument(
        "slots: expected the address of a server's slots, got other memory");
  }
  return table;
}

SlotPage& page_in(SlotTable& table, std::size_t slot) {
  const std::uint64_t count = table.count.load(std::memory_order_acquire);
  if (slot >= std::min<std::uint64_t>(count, kMostSlots)) {
    throw std::out_of_range("slot: expected a slot below " + std::to_string(count) + ", got " +
                            std::to_string(slot));
  }
  return table.pages[slot];
}

}  // namespace

ServerSlots::ServerSlots() : memory_(share_memory(sizeof(SlotTable))) {
  new (memory_->data()) SlotTable();
}

ServerSlots::ServerSlots(const SharedAddress& address) : memory_(attach_memory(address)) {
  table_in(*memory_);
}

SlotTable& ServerSlots::table() const { return *reinterpret_cast<SlotTable*>(memory_->data()); }

bool ServerSlots::is_asking(std::size_t slot) const {
  return found_[slot] != table().pages[slot].answered.load(std::memory_order_relaxed);
}

// The page of an unanswered question that asking() has found.
SlotPage& ServerSlots::page_asking(std::size_t slot) const {
  if (slot >= found_.size() || !is_asking(slot)) {
    throw std::logic_error("slot " + std::to_string(slot) +
                           ": expected an unanswered question, got none; see asking()");
  }
  return table().pages[slot];
}

std::size_t ServerSlots::count() const {
  const std::uint64_t count = table().count.load(std::memory_order_acquire);
  return std::min<std::uint64_t>(count, kMostSlots);  // the other process could change it
}

std::size_t ServerSlots::add() {
  owner_.check();
  const std::size_t slot = count();
  if (slot == kMostSlots) {
    throw std::length_error("slots: expected at most " + std::to_string(kMostSlots) +
                            " slots per server, got one more");
  }
  table().count.store(slot + 1, std::memory_order_release);
  return slot;
}

std::vector<std::size_t> ServerSlots::asking() {
  std::vector<std::size_t> slots;
  found_.resize(count());
  for (std::size_t slot = 0; slot < found_.size(); ++slot) {
    found_[slot] = table().pages[slot].asked.load(std::memory_order_acquire);
    if (is_asking(slot)) {
      slots.push_back(slot);
    }
  }
  return slots;
}

std::vector<std::size_t> ServerSlots::with_message() const {
  std::vector<std::size_t> slots;
  for (std::size_t slot = 0; slot < found_.size(); ++slot) {
    const SlotQuestion& question = table().pages[slot].question;
    if (is_asking(slot) && question.length.load(std::memory_order_relaxed) != 0) {
      slots.push_back(slot);
    }
  }
  return slots;
}

std::optional<Message> ServerSlots::question(std::size_t slot) const {
  return page_asking(slot).question.read(found_[slot]);
}

double ServerSlots::asked_at(std::size_t slot) const {
  return page_asking(slot).asked_at.load(std::memory_order_relaxed);
}

void ServerSlots::answer(std::size_t slot, std::span<const std::byte> message, std::uint64_t note) {
  write_answer(slot, message, note);
  wake(bit_of(slot));
}

void ServerSlots::write_answer(std::size_t slot, std::span<const std::byte> message,
                               std::uint64_t note) {
  owner_.check();
  SlotPage& to = page_asking(slot);
  to.answer.write(message);
  to.note.store(note, std::memory_order_relaxed);
  to.answered.store(found_[slot], std::memory_order_release);
}

void ServerSlots::wake(std::uint32_t bits) {
  auto& answers = table().answers;
  answers.fetch_add(1, std::memory_order_release);
  futex::wake_bits(answers, bits);
}

void ServerSlots::answer_all(std::span<const std::size_t> slots, std::uint64_t note) {
  for (const std::size_t slot : slots) {
    page_asking(slot);
  }
  std::uint32_t bits = 0;
  for (const std::size_t slot : slots) {
    write_answer(slot, {}, note);
    bits |= bit_of(slot);
  }
  if (bits != 0) {
    wake(bits);
  }
}

WorkerSlot::WorkerSlot(const SharedAddress& slots, std::size_t slot, const SharedAddress& bell)
    : memory_(attach_memory(slots)),
      page_(&page_in(table_in(*memory_), slot)),
      answers_(&table_in(*memory_).answers),
      bit_(bit_of(slot)),
      bell_(bell) {}

void WorkerSlot::ask(std::span<const std::byte> message) {
  owner_.check();
  SlotPage& to = page();
  const std::uint64_t before = to.asked.load(std::memory_order_relaxed);
  // The question of a worker that died may remain unanswered forever.
  if (asked_ != 0 && to.answered.load(std::memory_order_acquire) != before) {
    throw std::logic_error(
        "ask: expected an answer to the previous question first; call wait_answer()");
  }
  to.question.write(before + 1, message);
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  to.asked_at.store(now.count(), std::memory_order_relaxed);
  asked_ = before + 1;
  to.asked.store(asked_, std::memory_order_release);
  bell_.knock(message.empty() ? 1 : Bell::kUrgent);
}

bool WorkerSlot::wait_answer(Seconds timeout) const {
  const timespec deadline = futex::deadline_in(timeout);
  for (bool again = true; again;) {
    const std::uint64_t seen = answers_->load(std::memory_order_acquire);
    if (is_answered()) {
      return true;
    }
    again = futex::wait_bits(*answers_, seen, bit_, deadline);  // others may wake it, too
  }
  return is_answered();
}

bool WorkerSlot::is_answered() const {
  return page().answered.load(std::memory_order_acquire) == asked_;
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
  if (asked_ == 0 || !is_answered()) {
    throw std::logic_error(
        "answer: expected an answer to the last question, got none; call wait_answer()");
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
