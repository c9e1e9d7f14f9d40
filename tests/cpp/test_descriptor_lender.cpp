#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <thread>

#include "descriptor_lender.h"
#include "file.h"
#include "fork.h"

using namespace pycollect;

namespace {

std::uint64_t inode_of(int fd) {
  struct stat status{};
  REQUIRE(fstat(fd, &status) == 0);
  return status.st_ino;
}

}  // namespace

TEST_CASE("a descriptor is lent while it refers to the lent file") {
  const File folder(open("/", O_RDONLY | O_CLOEXEC));
  const std::uint64_t inode = inode_of(folder.fd());
  CHECK_THROWS_AS(borrow_descriptor(getpid(), folder.fd(), inode), SharedMemoryError);
  lend_descriptor(folder.fd(), inode);
  CHECK(lender_why_not() == "");
  for (int i = 0; i < 3; ++i) {
    const File borrowed(borrow_descriptor(getpid(), folder.fd(), inode));
    CHECK(borrowed.fd() != folder.fd());
    CHECK(inode_of(borrowed.fd()) == inode);
    CHECK((fcntl(borrowed.fd(), F_GETFD) & FD_CLOEXEC) != 0);
  }
  CHECK_THROWS_AS(borrow_descriptor(getpid(), folder.fd(), inode + 1), SharedMemoryError);
  take_back_descriptor(folder.fd());
  CHECK_THROWS_WITH_AS(borrow_descriptor(getpid(), folder.fd(), inode), doctest::Contains("share"),
                       SharedMemoryError);
}

TEST_CASE("a process that lends nothing refuses at once") {
  CHECK_THROWS_WITH_AS(borrow_descriptor(1 << 22, 3, 0), doctest::Contains("Connection refused"),
                       SharedMemoryError);
}

TEST_CASE("a forked child lends its own descriptors and leaves its parent's lent" *
          doctest::skip(!kMayFork)) {
  const File folder(open("/", O_RDONLY | O_CLOEXEC));
  const std::uint64_t inode = inode_of(folder.fd());
  lend_descriptor(folder.fd(), inode);
  wait_until_other_threads_sleep();
  CHECK(child_succeeds([&] {
    take_back_descriptor(folder.fd());
    const File other(open("/proc", O_RDONLY | O_CLOEXEC));
    const std::uint64_t inode_of_other = inode_of(other.fd());
    lend_descriptor(other.fd(), inode_of_other);
    const File borrowed(borrow_descriptor(getpid(), other.fd(), inode_of_other));
    return inode_of(borrowed.fd()) == inode_of_other;
  }));
  CHECK_NOTHROW(close(borrow_descriptor(getpid(), folder.fd(), inode)));
  take_back_descriptor(folder.fd());
}

TEST_CASE("a forked child lends even if another thread makes the first lender during the fork" *
          doctest::skip(!kMayFork)) {
  const File folder(open("/", O_RDONLY | O_CLOEXEC));
  const std::uint64_t inode = inode_of(folder.fd());
  const auto lends = [&] {
    lend_descriptor(folder.fd(), inode);
    return true;
  };
  for (int i = 0; i < 20; ++i) {
    CHECK(child_succeeds([&] {  // the child has no lender yet
      std::thread first(lends);
      bool all = true;
      for (int n = 0; n < 5; ++n) {
        all = all && child_succeeds(lends);
      }
      first.join();
      return all;
    }));
  }
}
