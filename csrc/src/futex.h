// Waiting for a number in memory that several processes may have mapped.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <ctime>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::futex {

// The kernel compares 32 bits, so use the half that changes.
inline const std::uint32_t* word_of(const std::atomic<std::uint64_t>& number) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  static_assert(sizeof(number) == sizeof(std::uint64_t));
  const auto* halves = reinterpret_cast<const std::uint32_t*>(&number);
  return std::endian::native == std::endian::little ? halves : halves + 1;
}

inline void wake_all(const std::atomic<std::uint64_t>& number) {
  syscall(SYS_futex, word_of(number), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Wakes all waiters for any bit of `bits`, in one system call.
inline void wake_bits(const std::atomic<std::uint64_t>& number, std::uint32_t bits) {
  syscall(SYS_futex, word_of(number), FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, bits);
}

inline timespec timespec_of(std::chrono::duration<double> timeout) {
  constexpr double kLongest = 86400;  // longer waits wake once a day
  const double seconds = std::fmin(std::fmax(timeout.count(), 0), kLongest);
  timespec parts{};
  parts.tv_sec = static_cast<std::time_t>(seconds);
  parts.tv_nsec = static_cast<long>((seconds - static_cast<double>(parts.tv_sec)) * 1e9);
  return parts;
}

// Sleeps while the number is `seen`, until a wake-up, a signal or the timeout. Returns false if the
// number differed from `seen` at the start.
inline bool wait(const std::atomic<std::uint64_t>& number, std::uint64_t seen,
                 std::chrono::duration<double> timeout) {
  const timespec time = timespec_of(timeout);
  const long status = syscall(SYS_futex, word_of(number), FUTEX_WAIT,
                              static_cast<std::uint32_t>(seen), &time, nullptr, 0);
  return status == 0 || errno != EAGAIN;
}

// The end of a wait of this length that begins now, on the monotonic clock.
inline timespec deadline_in(std::chrono::duration<double> timeout) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  timespec end = timespec_of(timeout);
  end.tv_sec += now.tv_sec;
  end.tv_nsec += now.tv_nsec;
  if (end.tv_nsec >= 1'000'000'000) {
    end.tv_nsec -= 1'000'000'000;
    ++end.tv_sec;
  }
  return end;
}

// As wait(), but until a deadline, for a call of wake_bits() with any bit of `bits`. Returns true
// after a wake-up or if the number differed from `seen` at the start; false after a signal or at
// the deadline.
inline bool wait_bits(const std::atomic<std::uint64_t>& number, std::uint64_t seen,
                      std::uint32_t bits, const timespec& deadline) {
  const long status = syscall(SYS_futex, word_of(number), FUTEX_WAIT_BITSET,
                              static_cast<std::uint32_t>(seen), &deadline, nullptr, bits);
  return status == 0 || errno == EAGAIN;
}

}  // namespace pycollect::inline PYCOLLECT_ABI::futex
