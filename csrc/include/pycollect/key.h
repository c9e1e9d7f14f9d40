// Key: the path of a leaf in a batch, a sequence of names.
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

// Written as "next.reward" or as Key("next", "reward"); the second form takes names that contain
// dots. Lookups compare strings: do them once, not in each step.
class Key {
 public:
  // The empty key.
  Key() = default;
  // Splits the names at dots; "" gives the empty key. Throws std::invalid_argument for an empty
  // name next to a dot.
  Key(std::string_view dotted);
  Key(const char* dotted) : Key(std::string_view(dotted)) {}
  Key(const std::string& dotted) : Key(std::string_view(dotted)) {}
  // Takes two or more names.
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

  // The key without its last name. The parent of a key with one name is empty.
  Key parent() const;
  // Concatenates two keys: Key("next") / "reward" is "next.reward".
  friend Key operator/(Key above, const Key& below) {
    above.names_.insert(above.names_.end(), below.begin(), below.end());
    return above;
  }

  friend bool operator==(const Key&, const Key&) = default;
  friend auto operator<=>(const Key&, const Key&) = default;

 private:
  std::vector<std::string> names_;
};

// The dotted form, "next.observation", for error messages.
std::string to_string(const Key& key);

inline namespace literals {

// Makes a key from a literal: "next.reward"_key.
inline Key operator""_key(const char* dotted, std::size_t length) {
  return Key(std::string_view(dotted, length));
}

}  // namespace literals

}  // namespace pycollect::inline PYCOLLECT_ABI
