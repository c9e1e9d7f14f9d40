#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "pycollect/detail/mailbox.h"
#include "pycollect/shared_memory.h"
#include "refused.h"

using namespace pycollect;

namespace {

constexpr Seconds kLong{60};

std::span<const std::byte> bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string text(const Message& message) {
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}

// A driver's bell and mailbox, and the worker's end, attached as in another process.
struct Pair {
  Bell bell;
  Mailbox driver{3};
  WorkerMailbox worker{driver.address(), bell.address()};
};

}  // namespace

TEST_CASE("questions are answered in order") {
  Pair p;
  CHECK_FALSE(p.worker.wait_ask(Seconds(0)));
  CHECK(p.driver.ask(bytes("one")) == 1);
  CHECK(p.driver.ask(bytes("")) == 2);
  CHECK_FALSE(p.driver.has_answer());
  CHECK(p.worker.wait_ask(Seconds(0)));
  CHECK(p.worker.number() == 1);
  CHECK(text(p.worker.question()) == "one");
  CHECK(text(p.worker.question()) == "one");  // the question stays until it is answered
  const std::uint64_t before = p.bell.count();
  p.worker.answer(bytes("1"));
  CHECK(p.bell.count() == before + 1);
  CHECK(p.driver.has_answer());
  CHECK(text(p.worker.question()) == "");
  p.worker.answer(bytes("2"));
  CHECK(text(p.driver.take_answer()) == "1");
  CHECK(text(p.driver.take_answer()) == "2");
  CHECK_FALSE(p.driver.has_answer());
}

TEST_CASE("messages that are too long and missing messages are refused") {
  Pair p;
  CHECK_THROWS_AS(p.driver.take_answer(), std::logic_error);
  CHECK_THROWS_AS(p.worker.question(), std::logic_error);
  CHECK_THROWS_AS(p.worker.answer(bytes("")), std::logic_error);
  const std::string longest(kAskBytes, 'x');
  CHECK_THROWS_AS(p.driver.ask(bytes(longest + "x")), std::length_error);
  p.driver.ask(bytes(longest));
  CHECK(text(p.worker.question()) == longest);
  CHECK_THROWS_AS(p.worker.answer(bytes(std::string(kAnswerBytes + 1, 'x'))), std::length_error);
  p.driver.ask(bytes(""));
  p.driver.ask(bytes(""));
  CHECK_THROWS_AS(p.driver.ask(bytes("")), std::logic_error);
  p.worker.answer(bytes(""));
  CHECK_THROWS_AS(p.driver.ask(bytes("")), std::logic_error);  // the slot still has an answer
  p.driver.take_answer();
  CHECK(p.driver.ask(bytes("")) == 4);
  CHECK_THROWS_AS(Mailbox(0), std::invalid_argument);
  CHECK_THROWS_AS(WorkerMailbox(p.bell.address(), p.bell.address()), std::invalid_argument);
  SharedAddress end = p.bell.address();
  end.bytes = 0;
  CHECK_REFUSED(Bell(end), "bell", std::invalid_argument);
}

TEST_CASE("numbers that the other process overwrites are not used as addresses") {
  Pair p;
  const auto memory = attach_memory(p.driver.address());
  const auto numbers = std::span(reinterpret_cast<std::uint64_t*>(memory->data()), 64);
  p.driver.ask(bytes("one"));
  for (const std::uint64_t capacity : {std::uint64_t{0}, std::uint64_t{1} << 40}) {
    numbers[1] = capacity;
    CHECK(text(p.worker.question()) == "one");
  }
  p.worker.answer(bytes("1"));
  for (std::uint64_t& number : numbers.subspan(8, 16)) {
    number = 7;  // more questions and answers than there are
  }
  CHECK(p.driver.answered() == 1);
  CHECK(text(p.driver.take_answer()) == "1");
  CHECK_THROWS_AS(p.driver.take_answer(), std::logic_error);
}

TEST_CASE("a published message is read after its numbers were overwritten") {
  Pair p;
  const auto memory = attach_memory(p.driver.address());
  const auto numbers = std::span(reinterpret_cast<std::uint64_t*>(memory->data()), 64);
  p.driver.publish(bytes("one"));
  const auto length = std::find(numbers.begin(), numbers.end(), 3);
  REQUIRE(length[-1] == 2);  // the edition
  *length = kAskBytes + 1;
  CHECK_THROWS_AS(p.worker.published(), std::runtime_error);
  length[-1] = 5;  // as during a write
  p.driver.publish(bytes("two"));
  CHECK(text(p.worker.published()) == "two");
}

TEST_CASE("the stop number never decreases") {
  Pair p;
  const SharedNumber stop = p.worker.stop();
  p.driver.stop(3);
  p.driver.stop(2);
  CHECK(stop->load() == 3);
}

TEST_CASE("waits end at their timeout") {
  Pair p;
  const auto start = std::chrono::steady_clock::now();
  CHECK_FALSE(p.worker.wait_ask(Seconds(0.01)));
  CHECK_FALSE(p.bell.wait_ring(p.bell.count(), Seconds(0.01)));
  CHECK_FALSE(p.bell.wait_ring(p.bell.count(), Seconds(-1)));
  CHECK(std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(20));
}

TEST_CASE("knocks wake the waiter and are not counted as rings") {
  Bell bell;
  bell.knock();
  CHECK(bell.count() == 0);
  CHECK(bell.knocks() == 1);
  CHECK(bell.wait_knock(0, kLong));
  CHECK_FALSE(bell.wait_knock(1, Seconds(0)));
  CHECK_FALSE(bell.wait_ring(0, Seconds(0)));
  bell.ring();
  CHECK(bell.count() == 1);
  CHECK(bell.knocks() == 1 + Bell::kUrgent);
  CHECK(bell.wait_knock(1, kLong));
  CHECK(bell.wait_ring(0, kLong));
}

TEST_CASE("a waiter for several knocks sleeps until all have come, or a ring") {
  Bell bell;
  bell.knock();
  bell.knock();
  CHECK(bell.wait_knock(0, kLong, 2));
  CHECK_FALSE(bell.wait_knock(0, Seconds(0.01), 3));
  CHECK_FALSE(bell.wait_knock(1, Seconds(0), 2));
  bell.ring();
  CHECK(bell.wait_knock(1, kLong, Bell::kUrgent));
}

TEST_CASE("the last of three knocks wakes a waiter for all three, repeatedly") {
  constexpr std::uint64_t kRounds = 2000, kThreads = 3;
  Bell bell;
  std::atomic<std::uint64_t> round = 0;
  std::vector<std::jthread> workers;
  for (std::uint64_t i = 0; i < kThreads; ++i) {
    workers.emplace_back([&round, address = bell.address()] {
      Bell theirs(address);
      for (std::uint64_t n = 0; n < kRounds; ++n) {
        round.wait(n);  // until round is n + 1
        theirs.knock();
      }
    });
  }
  for (std::uint64_t n = 0; n < kRounds; ++n) {
    round = n + 1;
    round.notify_all();
    CHECK(bell.wait_knock(n * kThreads, kLong, kThreads));
    CHECK(bell.knocks() == (n + 1) * kThreads);
  }
}

TEST_CASE("a driver and two workers in separate threads") {
  constexpr int kRounds = 2000;
  Bell bell;
  std::vector<std::unique_ptr<Mailbox>> boxes;
  std::vector<std::jthread> workers;
  for (int i = 0; i < 2; ++i) {
    boxes.push_back(std::make_unique<Mailbox>(2));
    workers.emplace_back([mailbox = boxes.back()->address(), bell = bell.address()] {
      WorkerMailbox end(mailbox, bell);
      for (int round = 0; round < kRounds; ++round) {
        while (!end.wait_ask(kLong)) {
        }
        const Message question = end.question();
        end.answer(question);
      }
    });
  }
  std::vector<int> sent(2), got(2);
  while (got[0] < kRounds || got[1] < kRounds) {
    const std::uint64_t seen = bell.count();
    bool any = false;
    for (std::size_t i = 0; i < 2; ++i) {
      while (sent[i] < kRounds && sent[i] - got[i] < 2) {
        boxes[i]->ask(bytes(std::to_string(sent[i]++)));
      }
      while (boxes[i]->has_answer()) {
        any = true;
        CHECK(text(boxes[i]->take_answer()) == std::to_string(got[i]++));
      }
    }
    if (!any) {
      bell.wait_ring(seen, kLong);
    }
  }
}

TEST_CASE("a published message is read whole at any time") {
  Pair p;
  CHECK(p.worker.published().empty());
  CHECK_THROWS_AS(p.driver.publish(bytes(std::string(kAskBytes + 1, 'x'))), std::length_error);
  p.driver.publish(bytes("one two three"));
  CHECK(text(p.worker.published()) == "one two three");
  std::jthread driver([&] {
    for (std::size_t i = 0; i < 20000; ++i) {
      p.driver.publish(bytes(std::string(1 + i % kAskBytes, static_cast<char>('a' + i % 26))));
    }
    p.driver.publish(bytes(""));
  });
  while (true) {
    const std::string found = text(p.worker.published());
    if (found.empty()) {
      break;
    }
    if (found != "one two three") {
      CHECK(found == std::string(found.size(), found[0]));
    }
  }
}
