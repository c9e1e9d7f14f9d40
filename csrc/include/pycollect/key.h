// Key: the path of a leaf in a batch, one name after the other.
#pragma once

#include <compare>
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Written "next.reward", or Key("next", "reward"), which takes names as they are, dots and all.
// Finding a leaf compares strings: do it once, not in each step.
class Key {
 public:
  // No name: the key of nothing.
  Key() = default;
  // Names with dots between them; "" is no name. Throws std::invalid_argument for an empty name
  // beside a dot.
  Key(std::string_view dotted);
  Key(const char* dotted) : Key(std::string_view(dotted)) {}
  Key(const std::string& dotted) : Key(std::string_view(dotted)) {}
  // Two names and more.
  template <typename... Names>
    requires(std::convertible_to<const Names&, std::string_view> && ...)
  Key(std::string_view first, std::string_view second, const Names&... names)
      : names_{std::string(first), std::string(second), std::string(std::string_view(names))...} {}
  explicit Key(std::vector<std::string> names) : names_(std::move(names)) {}

  std::size_t size() const { return names_.size(); }
  bool empty() const { return names_.empty(); }
  const std::string& operator[](std::size_t i) const { return names_[i]; }
  const std::string& back() const { return names_.back(); }
  auto begin() const { return names_.begin(); }
  auto end() const { return names_.end(); }
  void push_back(std::string name) { names_.push_back(std::move(name)); }

  // The key without its last name; empty for one of one name.
  Key parent() const;
  // One below the other: Key("next") / "reward" is "next.reward".
  friend Key operator/(Key above, const Key& below) {
    above.names_.insert(above.names_.end(), below.begin(), below.end());
    return above;
  }

  friend bool operator==(const Key&, const Key&) = default;
  friend auto operator<=>(const Key&, const Key&) = default;

 private:
  std::vector<std::string> names_;
};

// "next.observation", for error texts.
std::string to_string(const Key& key);

inline namespace literals {

// "next.reward"_key
inline Key operator""_key(const char* dotted, std::size_t length) {
  return Key(std::string_view(dotted, length));
}

}  // namespace literals

}  // namespace pycollect::inline PYCOLLECT_ABI
