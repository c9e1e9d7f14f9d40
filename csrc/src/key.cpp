#include "pycollect/key.h"

#include <stdexcept>

namespace pycollect::inline PYCOLLECT_ABI {

Key::Key(std::string_view dotted) {
  if (dotted.empty()) {
    return;
  }
  for (std::string_view rest = dotted;;) {
    const std::size_t dot = rest.find('.');
    names_.emplace_back(rest.substr(0, dot));
    if (names_.back().empty()) {
      throw std::invalid_argument("key: expected names separated by dots, got \"" +
                                  std::string(dotted) + "\"");
    }
    if (dot == std::string_view::npos) {
      return;
    }
    rest.remove_prefix(dot + 1);
  }
}

Key Key::parent() const {
  return empty() ? Key() : Key(std::vector<std::string>(names_.begin(), names_.end() - 1));
}

std::string to_string(const Key& key) {
  std::string text;
  for (const std::string& name : key) {
    text += (text.empty() ? "" : ".") + name;
  }
  return text;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
