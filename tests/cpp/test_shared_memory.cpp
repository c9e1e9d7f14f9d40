#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "pycollect/detail/memory_limits.h"
#include "pycollect/shared_memory.h"
#include "pycollect/shared_slab_pool.h"
#include "pycollect/thread_pool.h"

using namespace pycollect;

namespace {

Placement placement_of(std::int64_t steps) {
  return Placement(Layout({{{"a"}, DType::float32, {3}}}), {1, 2, steps, Order::stack});
}

// The number of open file descriptors of this process.
std::ptrdiff_t open_files() {
  const std::filesystem::directory_iterator folder("/proc/self/fd");
  return std::distance(begin(folder), end(folder));
}

// A folder that replaces / for queries of memory limits.
class Root {
 public:
  Root() {
    std::string name = (std::filesystem::temp_directory_path() / "pycollect-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Root() { std::filesystem::remove_all(path_); }
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << text;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace

TEST_CASE("attached memory is the same memory, and outlives its creator's reference") {
  CHECK(shared_memory_why_not() == "");
  auto ours = share_memory(10000);
  CHECK(ours->bytes() == 10000);
  CHECK(reinterpret_cast<std::uintptr_t>(ours->data()) % 4096 == 0);
  CHECK(ours->data()[9999] == std::byte{0});
  const SharedAddress address = *ours->address();
  CHECK(address.pid == getpid());
  auto theirs = attach_memory(address);
  CHECK(theirs->data() != ours->data());
  theirs->data()[9999] = std::byte{7};
  CHECK(ours->data()[9999] == std::byte{7});
  ours.reset();
  CHECK(theirs->data()[9999] == std::byte{7});
  CHECK_THROWS_AS(attach_memory(address), SharedMemoryError);
}

TEST_CASE("a copy of bytes can be attached, also of none") {
  std::vector<std::byte> bytes(10000, std::byte{5});
  const auto memory = share_copy(bytes);
  bytes.assign(bytes.size(), std::byte{6});
  CHECK(memory->bytes() == 10000);
  CHECK(memory->data()[9999] == std::byte{5});
  const auto attached = attach_memory(*memory->address());
  CHECK(attached->data()[9999] == std::byte{5});
  CHECK(attach_memory(*share_copy({})->address())->bytes() == 0);
}

TEST_CASE("shared memory is private to its user, has a fixed size, and leaks no descriptor") {
  share_memory(1);  // creates the lender's socket
  const auto before = open_files();
  {
    const auto memory = share_memory(1);
    const auto fd = static_cast<int>(memory->address()->fd);
    struct stat status{};
    REQUIRE(fstat(fd, &status) == 0);
    CHECK((status.st_mode & 0777) == 0600);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK(ftruncate(fd, 0) != 0);
    const auto attached = attach_memory(*memory->address());
    CHECK(open_files() == before + 1);
  }
  CHECK(open_files() == before);
}

TEST_CASE("a part is attached separately and keeps the whole memory") {
  auto whole = share_memory(3 * whole_pages(1));
  auto part = part_of(whole, whole_pages(1), 100);
  CHECK_THROWS_AS(part_of(whole, 64, 100), std::invalid_argument);
  CHECK_THROWS_AS(part_of(whole, 3 * whole_pages(1), 1), std::invalid_argument);
  CHECK_THROWS_AS(part_of(Memory::allocate(10000), 0, 1), std::invalid_argument);
  whole->data()[whole_pages(1)] = std::byte{3};
  whole.reset();
  const auto attached = attach_memory(*part->address());
  CHECK(attached->bytes() == 100);
  CHECK(attached->data()[0] == std::byte{3});
}

TEST_CASE("an address of released memory is refused") {
  const auto memory = share_memory(1);
  SharedAddress address = *memory->address();
  ++address.inode;
  CHECK_THROWS_AS(attach_memory(address), SharedMemoryError);
  address = *memory->address();
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t bytes : {2 * whole_pages(1), kMost, std::int64_t{-1}}) {
    address.bytes = bytes;
    CHECK_THROWS_AS(attach_memory(address), SharedMemoryError);
  }
  address.bytes = 1;
  for (const std::int64_t offset : {-whole_pages(1), kMost}) {
    address.offset = offset;
    CHECK_THROWS_AS(attach_memory(address), SharedMemoryError);
  }
  CHECK_THROWS_WITH_AS(attach_memory({getpid(), 987654, 1, 0, 1}), doctest::Contains("987654"),
                       SharedMemoryError);
}

TEST_CASE("too large a size is refused, naming both numbers") {
  const std::int64_t far_too_much = std::int64_t{1} << 60;
  const std::string came = "got " + std::to_string(far_too_much);
  CHECK_THROWS_WITH_AS(share_memory(far_too_much), doctest::Contains(came.c_str()),
                       std::length_error);
}

TEST_CASE("the smallest limit of machine and cgroups is the available memory") {
  const Root root;
  root.write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable:    3000 kB\n");
  CHECK(available_memory(root.path()).bytes == 3000 * 1024);
  CHECK(available_memory(root.path()).source == "MemAvailable");

  SUBCASE("v2: ancestors count, cached files do not") {
    root.write("proc/self/cgroup", "0::/a/b\n");
    root.write("sys/fs/cgroup/a/b/memory.max", "max\n");
    root.write("sys/fs/cgroup/a/b/memory.current", "900\n");
    root.write("sys/fs/cgroup/a/memory.max", "1000\n");
    root.write("sys/fs/cgroup/a/memory.current", "900\n");
    root.write("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 100\nactive_file 50\n");
    CHECK(available_memory(root.path()).bytes == 250);
    CHECK(available_memory(root.path()).source == "the memory cgroup");
  }
  SUBCASE("v1, in a container with its own group at the mount point") {
    root.write("proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/not/here\n");
    root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "500\n");
    root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "600\n");
    CHECK(available_memory(root.path()).bytes == 0);
  }
}

TEST_CASE("slabs circulate between workers and user") {
  SharedSlabPool pool(placement_of(5), 2, 1, true);
  CHECK(pool.stats().created == 3);
  auto a = pool.acquire();
  auto b = pool.acquire();
  auto c = pool.acquire();
  const auto there = attach_memory(*b->memory()->address());
  Slab worker_view(there, std::make_shared<const Placement>(placement_of(5)), b->generation());
  worker_view.data()[100] = std::byte{9};
  CHECK(b->data()[100] == std::byte{9});

  const std::uint64_t generation = a->generation();
  a.reset();
  a = pool.acquire();
  CHECK(a->generation() > generation);
  CHECK(pool.stats().lent == 3);
}

TEST_CASE("a pool whose slabs are all lent adds slabs, and keeps them") {
  ThreadPool threads(1);
  SharedSlabPool pool(placement_of(5), 1, 1, true);
  std::vector<std::shared_ptr<Slab>> lost = {pool.acquire(), pool.acquire()};
  auto added = pool.acquire();
  CHECK(pool.stats().created == 3);
  const auto there = attach_memory(*added->memory()->address());
  there->data()[100] = std::byte{9};
  CHECK(added->data()[100] == std::byte{9});
  CHECK(pool.deliver(threads, added) == added);
  added.reset();
  CHECK(there->data()[100] == std::byte{0xA5});

  lost.push_back(pool.acquire());
  CHECK(pool.stats().created == 3);
  lost.clear();
  CHECK(pool.stats().free == 3);
}

TEST_CASE("the user gets slabs while enough remain, then private copies") {
  ThreadPool threads(1);
  SharedSlabPool pool(placement_of(5), 2, 1, false);
  auto a = pool.acquire();
  auto b = pool.acquire();
  b->data()[0] = std::byte{5};
  auto first = pool.deliver(threads, a);
  CHECK(first == a);
  CHECK(pool.deliver(threads, a) == a);  // already delivered
  auto second = pool.deliver(threads, b);
  CHECK(second != b);
  CHECK_FALSE(second->memory()->address());
  CHECK(second->data()[0] == std::byte{5});
  CHECK(pool.copied() == 1);
  b.reset();
  CHECK(pool.stats().free == 2);  // the number that the workers need

  a.reset();
  first.reset();  // the last view: the user may get a slab again
  auto again = pool.acquire();
  CHECK(pool.deliver(threads, again) == again);

  SharedSlabPool other(placement_of(5), 1, 1, false);
  CHECK_THROWS_AS(other.deliver(threads, again), std::invalid_argument);
  CHECK_THROWS_AS(SharedSlabPool(placement_of(5), 0, 1, false), std::invalid_argument);
}

TEST_CASE("a shared slab outlives its pool") {
  std::shared_ptr<Slab> slab;
  {
    SharedSlabPool pool(placement_of(5), 1, 0, true);
    slab = pool.acquire();
  }
  slab->data()[0] = std::byte{1};
  slab.reset();
}
