#include "pycollect/slab.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "pycollect/copy.h"
#include "pycollect/detail/checked.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

class AllocationError : public std::bad_alloc {
 public:
  explicit AllocationError(std::int64_t bytes)
      : text_("cannot allocate " + std::to_string(bytes) +
              " bytes for a batch or weights; reduce frames_per_batch") {}

  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

}  // namespace

std::shared_ptr<Memory> Memory::allocate(std::int64_t bytes) {
  const bool huge = bytes >= 2 * kHugePage;
  const std::int64_t alignment = huge ? kHugePage : 64;
  const auto size = static_cast<std::size_t>(
      checked_mul((checked_add(bytes, alignment) - 1) / alignment, alignment));
  auto* data = static_cast<std::byte*>(
      std::aligned_alloc(static_cast<std::size_t>(alignment), size == 0 ? 64 : size));
  if (data == nullptr) {
    throw AllocationError(bytes);
  }
  if (huge) {
    // The first access is ten times cheaper with 2 MB pages than with 4 kB pages. An error is
    // harmless: the kernel then uses small pages.
    madvise(data, size, MADV_HUGEPAGE);
  }
  return std::make_shared<Memory>(data, bytes, [](std::byte* p) { std::free(p); });
}

Memory::Memory(std::byte* data, std::int64_t bytes, Deleter deleter,
               std::optional<SharedAddress> address)
    : data_(data), bytes_(bytes), deleter_(std::move(deleter)), address_(address) {
  if (reinterpret_cast<std::uintptr_t>(data) % 64 != 0) {
    throw std::invalid_argument("memory: expected an address that is a multiple of 64");
  }
}

Memory::~Memory() {
  if (deleter_) {
    deleter_(data_);
  }
}

Slab::Slab(std::shared_ptr<Memory> memory, std::shared_ptr<const Placement> placement,
           std::uint64_t generation)
    : memory_(std::move(memory)),
      placement_(std::move(placement)),
      generation_(generation),
      streams_(stores_for(placement_->bytes()) == Stores::streamed) {
  if (memory_->bytes() < placement_->bytes()) {
    throw std::invalid_argument("slab: expected " + std::to_string(placement_->bytes()) +
                                " bytes of memory, got " + std::to_string(memory_->bytes()));
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
