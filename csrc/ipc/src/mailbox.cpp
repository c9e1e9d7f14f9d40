#include "pycollect/detail/mailbox.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "futex.h"
#include "pycollect/detail/checked.h"
#include "pycollect/detail/process.h"
#include "pycollect/shared_memory.h"

namespace pycollect::inline PYCOLLECT_ABI {

struct MailboxPages {
  static constexpr std::uint64_t kMagic = 0x31306c69614d5000ULL;  // "\0PMail01"

  std::uint64_t magic;
  std::uint64_t capacity;
  alignas(64) std::atomic<std::uint64_t> asked{};
  alignas(64) std::atomic<std::uint64_t> done{};
  alignas(64) std::atomic<std::uint64_t> stop{};
  alignas(64) std::atomic<std::uint64_t> steps{};
  // The published message. The edition is odd while the message is being written (a sequence lock).
  alignas(64) std::atomic<std::uint64_t> edition{};
  std::atomic<std::uint64_t> length{};
  std::atomic<std::uint64_t> words[kAskBytes / sizeof(std::uint64_t)]{};
  // Followed by `capacity` slots for questions and `capacity` slots for answers.
};

struct BellPage {
  static constexpr std::uint64_t kNoWaiter = ~std::uint64_t{};

  std::atomic<std::uint64_t> rings{};
  std::atomic<std::uint64_t> knocks{};              // includes rings, which increment `rings` first
  std::atomic<std::uint64_t> wake_from{kNoWaiter};  // the waiter needs this number of knocks
};

namespace {

template <std::size_t bytes>
struct Slot {
  alignas(64) std::uint64_t length;
  std::byte message[bytes];
};
using AskSlot = Slot<kAskBytes>;
using AnswerSlot = Slot<kAnswerBytes>;
static_assert(sizeof(AskSlot) % 64 == 0 && sizeof(AnswerSlot) % 64 == 0);

std::int64_t bytes_for(std::int64_t capacity) {
  return checked_add(sizeof(MailboxPages),
                     checked_mul(capacity, sizeof(AskSlot) + sizeof(AnswerSlot)));
}

// Each end keeps its own copy of the capacity, because the other process could change the number in
// the shared memory.
AskSlot& ask_slot(MailboxPages& pages, std::uint64_t capacity, std::uint64_t number) {
  return reinterpret_cast<AskSlot*>(&pages + 1)[number % capacity];
}

AnswerSlot& answer_slot(MailboxPages& pages, std::uint64_t capacity, std::uint64_t number) {
  auto* asks = reinterpret_cast<AskSlot*>(&pages + 1);
  return reinterpret_cast<AnswerSlot*>(asks + capacity)[number % capacity];
}

void check_length(std::span<const std::byte> message, std::size_t most) {
  if (message.size() > most) {
    throw std::length_error("message: expected at most " + std::to_string(most) + " bytes, got " +
                            std::to_string(message.size()));
  }
}

template <std::size_t bytes>
void write(Slot<bytes>& slot, std::span<const std::byte> message) {
  check_length(message, bytes);
  slot.length = message.size();
  std::copy(message.begin(), message.end(), slot.message);
}

void check_read(std::uint64_t length, std::size_t most) {
  if (length > most) {
    throw std::runtime_error("mailbox: expected a message of at most " + std::to_string(most) +
                             " bytes, got " + std::to_string(length));
  }
}

template <std::size_t bytes>
Message read(const Slot<bytes>& slot) {
  const std::uint64_t length = slot.length;  // read once: the other process could change it
  check_read(length, bytes);
  return {slot.message, slot.message + length};
}

BellPage& page_in(const Memory& memory) { return *reinterpret_cast<BellPage*>(memory.data()); }

MailboxPages& pages_in(const Memory& memory) {
  return *reinterpret_cast<MailboxPages*>(memory.data());
}

std::int64_t checked_capacity(std::int64_t capacity) {
  if (capacity < 1) {
    throw std::invalid_argument("capacity: expected at least 1, got " + std::to_string(capacity));
  }
  return capacity;
}

}  // namespace

Bell::Bell() : memory_(share_memory(sizeof(BellPage))) { new (memory_->data()) BellPage(); }

Bell::Bell(const SharedAddress& address) : memory_(attach_memory(address)) {
  if (memory_->bytes() < static_cast<std::int64_t>(sizeof(BellPage))) {
    throw std::invalid_argument("bell: expected the address of a bell, got other memory");
  }
}

std::uint64_t Bell::count() const {
  return page_in(*memory_).rings.load(std::memory_order_acquire);
}

void Bell::ring() {
  owner_.check();
  auto& rings = page_in(*memory_).rings;
  rings.fetch_add(1, std::memory_order_release);
  futex::wake_all(rings);
  knock(kUrgent);
}

bool Bell::wait_ring(std::uint64_t seen, Seconds timeout) const {
  if (count() == seen) {
    futex::wait(page_in(*memory_).rings, seen, timeout);
  }
  return count() != seen;
}

void Bell::ring_when_gone(int pid) {
  owner_.check();
  try {
    when_gone(pid, [bell = *this]() mutable { bell.ring(); });
  } catch (const std::system_error& error) {
    if (error.code() == std::errc::no_such_process) {
      ring();
    }
  }
}

std::uint64_t Bell::knocks() const {
  return page_in(*memory_).knocks.load(std::memory_order_acquire);
}

// Each side first writes its own number and then reads the other's, in sequentially consistent
// order. So either the waiter sees this knock, or this thread sees the waiter.
void Bell::knock(std::uint64_t times) {
  owner_.check();
  BellPage& page = page_in(*memory_);
  if (page.knocks.fetch_add(times) + times >= page.wake_from.load()) {
    futex::wake_all(page.knocks);
  }
}

bool Bell::wait_knock(std::uint64_t heard, Seconds timeout, std::uint64_t number) const {
  BellPage& page = page_in(*memory_);
  const std::uint64_t enough = heard + number;
  page.wake_from.store(enough);
  std::uint64_t knocks = page.knocks.load();
  // wait() returns false without sleeping if the number of knocks has changed.
  while (knocks < enough && !futex::wait(page.knocks, knocks, timeout)) {
    knocks = page.knocks.load();
  }
  page.wake_from.store(BellPage::kNoWaiter);
  return this->knocks() >= enough;
}

Mailbox::Mailbox(std::int64_t capacity)
    : memory_(share_memory(bytes_for(checked_capacity(capacity)))),
      capacity_(static_cast<std::uint64_t>(capacity)) {
  new (memory_->data()) MailboxPages{.magic = MailboxPages::kMagic, .capacity = capacity_};
}

MailboxPages& Mailbox::pages() const { return pages_in(*memory_); }

std::uint64_t Mailbox::ask(std::span<const std::byte> message) {
  owner_.check();
  if (asked_ - taken_ >= capacity_) {
    throw std::logic_error("ask: expected at most " + std::to_string(capacity_) +
                           " questions without a taken answer; call take_answer()");
  }
  write(ask_slot(pages(), capacity_, asked_ + 1), message);
  ++asked_;
  pages().asked.store(asked_, std::memory_order_release);
  futex::wake_all(pages().asked);
  return asked_;
}

std::uint64_t Mailbox::answered() const {
  return std::min(pages().done.load(std::memory_order_acquire), asked_);
}

bool Mailbox::has_answer() const { return answered() > taken_; }

Message Mailbox::take_answer() {
  if (!has_answer()) {
    throw std::logic_error("take_answer: expected an answer, got none; see has_answer()");
  }
  Message message = read(answer_slot(pages(), capacity_, taken_ + 1));
  ++taken_;
  return message;
}

void Mailbox::stop(std::uint64_t number) {
  owner_.check();
  auto& stop = pages().stop;
  std::uint64_t before = stop.load(std::memory_order_relaxed);
  while (before < number && !stop.compare_exchange_weak(before, number)) {
  }
}

void Mailbox::publish(std::span<const std::byte> message) {
  owner_.check();
  check_length(message, kAskBytes);
  MailboxPages& to = pages();
  // Odd, whatever another process has written there.
  const std::uint64_t edition = to.edition.load(std::memory_order_relaxed) | 1;
  // A reader that sees any of the new words also sees the odd edition, because each store releases
  // it.
  to.edition.store(edition, std::memory_order_relaxed);
  to.length.store(message.size(), std::memory_order_release);
  for (std::size_t at = 0; at < message.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, message.data() + at, std::min(sizeof(word), message.size() - at));
    to.words[at / sizeof(word)].store(word, std::memory_order_release);
  }
  to.edition.store(edition + 1, std::memory_order_release);
}

std::uint64_t Mailbox::steps() const { return pages().steps.load(std::memory_order_relaxed); }

WorkerMailbox::WorkerMailbox(const SharedAddress& mailbox, const SharedAddress& bell)
    : memory_(attach_memory(mailbox)), bell_(bell) {
  const auto size = static_cast<std::size_t>(memory_->bytes());
  const bool is_mailbox = size >= sizeof(MailboxPages) && pages().magic == MailboxPages::kMagic;
  capacity_ = is_mailbox ? pages().capacity : 0;
  if (capacity_ < 1 || capacity_ > size ||
      bytes_for(static_cast<std::int64_t>(capacity_)) != memory_->bytes()) {
    throw std::invalid_argument("mailbox: expected the address of a mailbox, got other memory");
  }
}

MailboxPages& WorkerMailbox::pages() const { return pages_in(*memory_); }

bool WorkerMailbox::wait_ask(Seconds timeout) const {
  const auto& asked = pages().asked;
  std::uint64_t seen = asked.load(std::memory_order_acquire);
  if (seen <= answered_) {
    futex::wait(asked, seen, timeout);
    seen = asked.load(std::memory_order_acquire);
  }
  return seen > answered_;
}

Message WorkerMailbox::question() const {
  if (pages().asked.load(std::memory_order_acquire) <= answered_) {
    throw std::logic_error("question: expected an unanswered question, got none; see wait_ask()");
  }
  return read(ask_slot(pages(), capacity_, number()));
}

void WorkerMailbox::answer(std::span<const std::byte> message) {
  owner_.check();
  if (pages().asked.load(std::memory_order_acquire) <= answered_) {
    throw std::logic_error("answer: expected an unanswered question, got none; see wait_ask()");
  }
  write(answer_slot(pages(), capacity_, number()), message);
  ++answered_;
  pages().done.store(answered_, std::memory_order_release);
  bell_.ring();
}

Message WorkerMailbox::published() const {
  const MailboxPages& from = pages();
  while (true) {
    const std::uint64_t edition = from.edition.load(std::memory_order_acquire);
    const std::uint64_t length = from.length.load(std::memory_order_acquire);
    if (edition % 2 == 0) {
      Message message(std::min<std::uint64_t>(length, kAskBytes));
      for (std::size_t at = 0; at < message.size(); at += sizeof(std::uint64_t)) {
        const std::uint64_t word = from.words[at / sizeof(word)].load(std::memory_order_acquire);
        std::memcpy(message.data() + at, &word, std::min(sizeof(word), message.size() - at));
      }
      if (from.edition.load(std::memory_order_relaxed) == edition) {
        check_read(length, kAskBytes);
        return message;
      }
    }
    std::this_thread::yield();  // a write takes less than a microsecond
  }
}

SharedNumber WorkerMailbox::stop() const { return {memory_, &pages().stop}; }

SharedNumber WorkerMailbox::steps() const { return {memory_, &pages().steps}; }

}  // namespace pycollect::inline PYCOLLECT_ABI
