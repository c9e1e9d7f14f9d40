// Addresses of shared memory, bells, mailboxes and slots, into which another process may write any
// bytes. Until it does, messages arrive whole and in order.

#include <unistd.h>

#include <deque>
#include <memory>
#include <stdexcept>

#include "fuzz.h"
#include "pycollect/detail/mailbox.h"
#include "pycollect/detail/slot.h"
#include "pycollect/shared_memory.h"

using namespace pycollect;
using namespace pycollect::fuzz;

namespace {

constexpr Seconds kNow{0};

Message message_of(Bytes& in, std::size_t most) {
  const int kind = in.below(8);
  Message message(kind == 7 ? most + 1 : kind == 6 ? most : static_cast<std::size_t>(in.byte()));
  in.fill(std::span(message).first(std::min<std::size_t>(message.size(), 64)));
  return message;
}

// Writes one number anywhere into the first pages, often at the start of a cache line.
void overwrite(Bytes& in, const Memory& memory) {
  const auto limit =
      static_cast<std::uint64_t>(std::min<std::int64_t>(memory.bytes(), 1 << 16)) - 8;
  const auto at = in.below(4) != 0 ? static_cast<std::uint64_t>(in.below(24)) * 64
                                   : static_cast<std::uint64_t>(in.int64());
  const std::int64_t number = in.size();
  std::memcpy(memory.data() + at % limit / 8 * 8, &number, 8);
}

void check_mailbox(Bytes& in) {
  const std::int64_t capacity = 1 + in.below(3);
  Bell bell;
  Mailbox driver(capacity);
  WorkerMailbox worker(driver.address(), bell.address());
  const auto memory = attach_memory(driver.address());
  std::deque<Message> questions, answers;
  Message published;
  bool intact = true, readable = true;
  std::uint64_t asked = 0, taken = 0;
  for (int calls = 0; calls < 64 && !in.is_empty(); ++calls) {
    switch (in.below(8)) {
      case 0: {
        const Message message = message_of(in, kAskBytes);
        const bool fits = message.size() <= kAskBytes;
        const bool refused = throws<std::logic_error>([&] { driver.ask(message); });
        EXPECT(refused == (!fits || asked - taken >= static_cast<std::uint64_t>(capacity)));
        asked += refused ? 0 : 1;
        if (!refused) {
          questions.push_back(message);
        }
        break;
      }
      case 1: {
        Message question;
        const bool waits = worker.wait_ask(kNow);
        const bool refused = throws<std::exception>([&] { question = worker.question(); });
        EXPECT(question.size() <= kAskBytes);
        if (intact) {
          EXPECT(waits == !questions.empty() && refused == questions.empty());
          EXPECT(refused || question == questions.front());
        }
        break;
      }
      case 2: {
        const Message message = message_of(in, kAnswerBytes);
        const bool refused = throws<std::logic_error>([&] { worker.answer(message); });
        if (intact) {
          EXPECT(refused == (questions.empty() || message.size() > kAnswerBytes));
          if (!refused) {
            questions.pop_front();
            answers.push_back(message);
          }
        }
        break;
      }
      case 3: {
        Message answer;
        const bool refused = throws<std::exception>([&] { answer = driver.take_answer(); });
        EXPECT(answer.size() <= kAnswerBytes);
        taken += refused ? 0 : 1;
        EXPECT(taken <= asked);  // no answer to a question that was never asked
        if (intact) {
          EXPECT(refused == answers.empty());
          if (!refused) {
            EXPECT(answer == answers.front());
            answers.pop_front();
          }
        }
        break;
      }
      case 4:
        published = message_of(in, kAskBytes);
        if (throws<std::length_error>([&] { driver.publish(published); })) {
          EXPECT(published.size() > kAskBytes);
          published.clear();
          readable = false;
        } else {
          readable = true;
        }
        break;
      case 5:
        if (readable) {  // with an odd edition, it would wait for the writer
          EXPECT(worker.published() == published);
        }
        break;
      case 6: {
        const auto number = static_cast<std::uint64_t>(in.size());
        const std::uint64_t before = worker.stop()->load();
        driver.stop(number);
        EXPECT(worker.stop()->load() == std::max(before, number));
        EXPECT(driver.steps() == worker.steps()->load());
        break;
      }
      default:
        overwrite(in, *memory);
        intact = readable = false;
    }
  }
}

void check_bell(Bytes& in) {
  Bell bell;
  Bell other(bell.address());
  const auto memory = attach_memory(bell.address());
  for (int calls = 0; calls < 16 && !in.is_empty(); ++calls) {
    const std::uint64_t rings = bell.count(), knocks = other.knocks();
    in.one_in(2) ? other.ring() : other.knock(1);
    EXPECT(bell.knocks() != knocks);
    EXPECT(bell.wait_ring(rings, kNow) == (bell.count() != rings));
    if (in.one_in(4)) {
      overwrite(in, *memory);
    }
  }
}

void check_slots(Bytes& in) {
  Bell bell;
  ServerSlots owner;
  ServerSlots attached(owner.address());
  ServerSlots& server = in.one_in(2) ? owner : attached;
  const auto memory = attach_memory(owner.address());
  std::vector<WorkerSlot> workers;
  std::vector<std::optional<Message>> asked, answered;
  std::vector<std::uint64_t> notes;
  bool intact = true;
  for (int calls = 0; calls < 64 && !in.is_empty(); ++calls) {
    const auto slot = static_cast<std::size_t>(in.below(3));
    switch (in.below(7)) {
      case 0:
        if (workers.size() < 3) {
          const bool failed = throws<std::logic_error>(
              [&] { workers.emplace_back(owner.address(), owner.add(), bell.address()); });
          EXPECT(!failed || !intact);
          asked.resize(workers.size());
          answered.resize(workers.size());
          notes.resize(workers.size());
        }
        break;
      case 1:
        if (slot < workers.size()) {
          const Message message = message_of(in, kSlotBytes);
          const bool refused = throws<std::logic_error>([&] { workers[slot].ask(message); });
          if (intact) {
            EXPECT(refused == (message.size() > kSlotBytes || asked[slot].has_value()));
          }
          if (!refused) {
            asked[slot] = message;
            answered[slot].reset();
          }
        }
        break;
      case 2: {
        const std::vector<std::size_t> asking = server.asking();
        for (std::size_t i = 0; i < workers.size() && intact; ++i) {
          const bool found = std::count(asking.begin(), asking.end(), i) == 1;
          EXPECT(found == asked[i].has_value());
        }
        for (const std::size_t i : server.with_message()) {
          EXPECT(!intact || !asked[i]->empty());
        }
        for (const std::size_t i : asking) {
          std::optional<Message> question;
          const bool failed = throws<std::runtime_error>([&] { question = server.question(i); });
          EXPECT(!failed || !intact);
          EXPECT(!question || question->size() <= kSlotBytes);
          EXPECT(!intact || question == asked[i]);
          EXPECT(!intact || server.asked_at(i) > 0);
        }
        break;
      }
      case 3: {
        const std::vector<std::size_t> asking = server.asking();
        const Message message = message_of(in, kSlotBytes);
        const auto note = static_cast<std::uint64_t>(in.size());
        const bool refused = throws<std::logic_error>([&] { server.answer(slot, message, note); });
        if (intact) {
          const bool found = std::count(asking.begin(), asking.end(), slot) == 1;
          EXPECT(refused == (!found || message.size() > kSlotBytes));
          if (!refused) {
            asked[slot].reset();
            answered[slot] = message;
            notes[slot] = note;
          }
        }
        break;
      }
      case 4: {
        const std::vector<std::size_t> asking = server.asking();
        const auto note = static_cast<std::uint64_t>(in.size());
        server.answer_all(asking, note);
        for (std::size_t i = 0; i < workers.size() && intact; ++i) {
          if (asked[i]) {
            asked[i].reset();
            answered[i] = Message();
            notes[i] = note;
          }
        }
        break;
      }
      case 5:
        if (slot < workers.size()) {
          Message answer;
          std::uint64_t note = 0;
          const bool is_there = workers[slot].wait_answer(kNow);
          const bool refused = throws<std::exception>([&] {
            answer = workers[slot].answer();
            note = workers[slot].note();
          });
          EXPECT(answer.size() <= kSlotBytes);
          if (intact && (asked[slot] || answered[slot])) {
            EXPECT(is_there == answered[slot].has_value() && refused == !is_there);
            EXPECT(refused || (answer == *answered[slot] && note == notes[slot]));
          }
        }
        break;
      default:
        overwrite(in, *memory);
        intact = false;
    }
  }
}

void check_address(Bytes& in) {
  constexpr std::int64_t kBytes = 3 * 4096;
  const auto memory = share_memory(kBytes);
  SharedAddress address = *memory->address();
  std::int64_t* const numbers[] = {&address.offset, &address.bytes, &address.fd};
  for (int changes = in.below(4); changes > 0; --changes) {
    std::int64_t& number = *numbers[in.below(3)];
    number = in.one_in(2) ? in.size() : static_cast<std::int64_t>(in.below(5)) * 4096;
  }
  if (in.one_in(16)) {
    address.pid = in.one_in(2) ? -1 : std::numeric_limits<std::int64_t>::max();
  }
  if (in.one_in(16)) {
    address.inode += 1;
  }
  std::shared_ptr<Memory> found;
  const bool refused = throws<SharedMemoryError>([&] { found = attach_memory(address); });
  SharedAddress known = *memory->address();
  known.offset = address.offset;
  known.bytes = address.bytes;
  const bool fits = known == address && address.offset >= 0 && address.bytes >= 0 &&
                    address.offset % 4096 == 0 && address.offset <= kBytes &&
                    address.bytes <= kBytes - address.offset;
  EXPECT(refused == !fits);
  if (found) {
    EXPECT(found->bytes() == address.bytes);
    std::memset(found->data(), 0x5a, static_cast<std::size_t>(address.bytes));
    EXPECT(std::all_of(memory->data() + address.offset,
                       memory->data() + address.offset + address.bytes,
                       [](std::byte b) { return b == std::byte{0x5a}; }));
  }
  // The memory has no mailbox or server. A bell accepts any bytes, if there are enough of them.
  EXPECT(throws<std::exception>([&] { WorkerMailbox(address, address); }));
  EXPECT(throws<std::exception>([&] { ServerSlots{address}; }));
  if (throws<std::exception>([&] { Bell(address).knock(1); })) {
    EXPECT(!fits || address.bytes < 64);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes in(data, size);
  switch (in.below(4)) {
    case 0:
      check_mailbox(in);
      break;
    case 1:
      check_slots(in);
      break;
    case 2:
      check_bell(in);
      break;
    default:
      check_address(in);
  }
  return 0;
}
