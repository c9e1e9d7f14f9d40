#include <doctest/doctest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "pycollect/key.h"

using pycollect::Key;

TEST_CASE("a key is made from dotted text or from single names") {
  using namespace pycollect::literals;
  const Key key = "next.reward";
  CHECK(key == Key("next", "reward"));
  CHECK(key == "next.reward"_key);
  CHECK(key == Key(std::string("next.reward")));
  CHECK(key == Key(std::vector<std::string>{"next", "reward"}));
  CHECK(key == Key("next") / "reward");
  CHECK(key.size() == 2);
  CHECK(key[0] == "next");
  CHECK(key.back() == "reward");
  CHECK(key.parent() == "next");
  CHECK(key.parent().parent().empty());
  CHECK(key != Key("next"));
  CHECK(Key("next") < key);
  CHECK(to_string(key) == "next.reward");
  CHECK(Key("a", "b", std::string("c")).size() == 3);
}

TEST_CASE("single names keep their dots") {
  CHECK(Key("next", "a.b").size() == 2);
  CHECK(Key(std::vector<std::string>{"a.b"}).size() == 1);
  CHECK(Key(std::vector<std::string>{"a.b"}) != Key("a.b"));
}

TEST_CASE("a key with an empty name between dots is refused") {
  CHECK(Key("").empty());
  for (const char* text : {".", "a.", ".a", "a..b"}) {
    CHECK_THROWS_AS(Key{text}, std::invalid_argument);
  }
}
