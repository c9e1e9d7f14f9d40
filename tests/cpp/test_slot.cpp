#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "pycollect/detail/slot.h"
#include "pycollect/shared_memory.h"

using namespace pycollect;

namespace {

constexpr Seconds kLong{60};

std::span<const std::byte> bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string text(const Message& message) {
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}

// One slot of a server.
struct Slot {
  ServerSlots& slots;
  std::size_t number = slots.add();

  bool has_question() {
    const auto asking = slots.asking();
    return std::find(asking.begin(), asking.end(), number) != asking.end();
  }
  Message question() const {
    const auto found = slots.question(number);
    REQUIRE(found);
    return *found;
  }
  void answer(std::span<const std::byte> message, std::uint64_t note) {
    slots.answer(number, message, note);
  }
};

// A server's bell and slot, and the worker's end, attached as in another process.
struct Pair {
  Bell bell;
  ServerSlots slots;
  Slot server{slots};
  WorkerSlot worker{slots.address(), server.number, bell.address()};
};

}  // namespace

TEST_CASE("a question knocks, and waits for its answer and note") {
  Pair p;
  CHECK_FALSE(p.server.has_question());
  const std::uint64_t before = p.bell.knocks();
  p.worker.ask(bytes("what"));
  CHECK(p.bell.knocks() == before + Bell::kUrgent);
  CHECK(p.bell.count() == 0);
  CHECK(p.server.has_question());
  CHECK(text(p.server.question()) == "what");
  CHECK_FALSE(p.worker.wait_answer(Seconds(0)));
  p.server.answer(bytes("that"), 7);
  CHECK_FALSE(p.server.has_question());
  CHECK(p.worker.wait_answer(Seconds(0)));
  CHECK(text(p.worker.answer()) == "that");
  CHECK(p.worker.note() == 7);
  p.worker.ask({});
  CHECK(p.bell.knocks() == before + Bell::kUrgent + 1);
}

TEST_CASE("questions with empty answers are answered together") {
  Pair p;
  const Slot second{p.slots}, third{p.slots};
  WorkerSlot other(p.slots.address(), second.number, p.bell.address());
  WorkerSlot telling(p.slots.address(), third.number, p.bell.address());
  p.worker.ask({});
  other.ask({});
  telling.ask(bytes("this"));
  CHECK(p.slots.with_message().empty());  // asking() has not found the question yet
  CHECK(p.slots.asking() == std::vector<std::size_t>{0, 1, 2});
  CHECK(p.slots.with_message() == std::vector<std::size_t>{2});
  const std::vector<std::size_t> too_many{0, 1, 3}, both{0, 1};
  CHECK_THROWS_AS(p.slots.answer_all(too_many, 5), std::logic_error);
  CHECK_FALSE(p.worker.wait_answer(Seconds(0)));
  p.slots.answer_all(both, 5);
  for (WorkerSlot* worker : {&p.worker, &other}) {
    CHECK(worker->wait_answer(Seconds(0)));
    CHECK(worker->answer().empty());
    CHECK(worker->note() == 5);
  }
  CHECK_THROWS_AS(p.slots.answer_all(both, 6), std::logic_error);
  CHECK_FALSE(telling.wait_answer(Seconds(0)));
}

TEST_CASE(
    "one answer wakes all its sleeping workers, even if other workers are answered meanwhile") {
  constexpr std::size_t kWorkers = 35;  // three of them share their bit with another worker
  constexpr int kTimes = 50;
  Bell bell;
  ServerSlots slots;
  std::vector<std::size_t> numbers(kWorkers);
  std::generate(numbers.begin(), numbers.end(), [&slots] { return slots.add(); });
  std::vector<std::thread> workers;
  for (const std::size_t number : numbers) {
    workers.emplace_back([&, number] {
      WorkerSlot worker(slots.address(), number, bell.address());
      for (int n = 0; n < kTimes; ++n) {
        worker.ask({});
        CHECK(worker.wait_answer(kLong));  // one wait, even if other workers are woken
        CHECK(worker.note() == static_cast<std::uint64_t>(n) * 2 + number % 2);
      }
    });
  }
  for (std::uint64_t turn = 0; turn < kTimes * 2; ++turn) {
    std::vector<std::size_t> served;
    std::copy_if(numbers.begin(), numbers.end(), std::back_inserter(served),
                 [turn](std::size_t number) { return number % 2 == turn % 2; });
    const auto all_ask = [&] {
      const auto asking = slots.asking();
      return std::includes(asking.begin(), asking.end(), served.begin(), served.end());
    };
    for (std::uint64_t heard = bell.knocks(); !all_ask(); heard = bell.knocks()) {
      bell.wait_knock(heard, kLong);
    }
    slots.answer_all(served, turn);
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
}

TEST_CASE("messages that are too long and missing messages are refused") {
  Pair p;
  CHECK_THROWS_AS(p.server.question(), std::logic_error);
  CHECK_THROWS_AS(p.server.answer(bytes(""), 0), std::logic_error);
  CHECK_THROWS_AS(p.worker.answer(), std::logic_error);
  const std::string longest(kSlotBytes, 'x');
  CHECK_THROWS_AS(p.worker.ask(bytes(longest + "x")), std::length_error);
  p.worker.ask(bytes(longest));
  CHECK(p.server.has_question());
  CHECK(text(p.server.question()) == longest);
  CHECK_THROWS_AS(p.worker.ask(bytes("")), std::logic_error);
  CHECK_THROWS_AS(p.worker.note(), std::logic_error);
  CHECK_THROWS_AS(p.server.answer(bytes(longest + "x"), 0), std::length_error);
  p.server.answer(bytes(longest), 0);
  CHECK(text(p.worker.answer()) == longest);
  CHECK_THROWS_AS(WorkerSlot(p.bell.address(), 0, p.bell.address()), std::invalid_argument);
  CHECK_THROWS_AS(WorkerSlot(p.slots.address(), 1, p.bell.address()), std::out_of_range);
  CHECK_THROWS_AS(ServerSlots{p.bell.address()}, std::invalid_argument);
  CHECK_THROWS_AS(p.slots.question(1), std::logic_error);
  CHECK_THROWS_AS(p.slots.answer(1, bytes(""), 0), std::logic_error);
}

TEST_CASE("the successor of a dead worker continues with its slot") {
  Pair p;
  p.worker.ask(bytes("from one that dies"));
  CHECK(p.server.has_question());
  WorkerSlot next(p.slots.address(), 0, p.bell.address());
  CHECK_THROWS_AS(next.answer(), std::logic_error);
  next.ask(bytes("from the next"));
  p.server.answer(bytes("to the one that died"), 1);
  CHECK_FALSE(next.wait_answer(Seconds(0)));
  CHECK(p.server.has_question());
  CHECK(text(p.server.question()) == "from the next");
  p.server.answer(bytes("to the next"), 1);
  CHECK(next.wait_answer(Seconds(0)));
  CHECK(text(next.answer()) == "to the next");
}

TEST_CASE("a server that attaches finds existing questions and later slots") {
  Pair p;
  p.worker.ask(bytes("what"));
  ServerSlots other(p.slots.address());
  CHECK(other.count() == 1);
  CHECK(other.asking() == std::vector<std::size_t>{0});
  other.answer(0, bytes("that"), 3);
  CHECK(text(p.worker.answer()) == "that");
  const Slot late{p.slots};
  CHECK(late.number == 1);
  WorkerSlot second(p.slots.address(), late.number, p.bell.address());
  second.ask({});
  CHECK(other.asking() == std::vector<std::size_t>{1});
  while (p.slots.count() < kMostSlots) {
    p.slots.add();
  }
  CHECK_THROWS_AS(p.slots.add(), std::length_error);
}

TEST_CASE("a sleeping worker is woken, repeatedly") {
  Pair p;
  constexpr std::uint64_t kTimes = 1000;
  std::thread server([&p] {
    for (std::uint64_t n = 1; n <= kTimes; ++n) {
      while (!p.server.has_question()) {
        p.bell.wait_knock(n - 1, kLong);
      }
      p.server.answer({}, n);
    }
  });
  for (std::uint64_t n = 1; n <= kTimes; ++n) {
    p.worker.ask({});
    while (!p.worker.wait_answer(kLong)) {
    }
    CHECK(p.worker.note() == n);
  }
  server.join();
}

TEST_CASE("a question that a dead worker's successor overwrites is not returned") {
  Pair p;
  p.worker.ask(bytes("the dead worker's"));
  CHECK(p.slots.asking() == std::vector<std::size_t>{0});
  WorkerSlot successor(p.slots.address(), p.server.number, p.bell.address());
  successor.ask(bytes("its own"));
  CHECK_FALSE(p.slots.question(0));
  CHECK(p.slots.asking() == std::vector<std::size_t>{0});
  CHECK(text(p.server.question()) == "its own");
}

TEST_CASE("a question that is read while it is overwritten is whole or not returned") {
  constexpr int kTimes = 20000;
  Pair p;
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int n = 0; n < kTimes; ++n) {  // each worker dies at once
      WorkerSlot worker(p.slots.address(), p.server.number, p.bell.address());
      worker.ask(bytes(std::string(n % 400 + 1, static_cast<char>('a' + n % 26))));
    }
    done = true;
  });
  while (!done) {
    if (p.server.has_question()) {
      if (const auto found = p.slots.question(0)) {
        const std::string read = text(*found);
        REQUIRE(read == std::string(read.size(), read.front()));
      }
    }
  }
  writer.join();
}
