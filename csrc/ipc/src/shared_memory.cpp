#include "pycollect/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "descriptor_lender.h"
#include "file.h"
#include "pycollect/detail/checked.h"
#include "pycollect/detail/memory_limits.h"

// Missing in the headers of older C libraries.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

struct stat status_of(const File& file) {
  struct stat result{};
  if (fstat(file.fd(), &result) != 0) {
    throw failed("fstat");
  }
  return result;
}

// A file in memory, lent to other processes while it is open.
class SharedFile {
 public:
  explicit SharedFile(File file) : file_(std::move(file)) {
    lend_descriptor(file_.fd(), status_of(file_).st_ino);
  }
  ~SharedFile() { take_back_descriptor(file_.fd()); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

 private:
  File file_;
};

File create_file() {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = memfd_create("pycollect", flags | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) {  // before Linux 6.3
    fd = memfd_create("pycollect", flags);
  }
  File file(fd);
  if (fd < 0) {
    throw failed("memfd_create");
  }
  if (fchmod(fd, 0600) != 0) {
    throw failed("fchmod");
  }
  return file;
}

std::byte* map(int fd, std::int64_t offset, std::int64_t bytes, int flags) {
  void* data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_SHARED | flags, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    throw failed("mmap of " + std::to_string(bytes) + " bytes");
  }
  return static_cast<std::byte*>(data);
}

// Allocates every page now. With one call, a lack of memory is an error; at first access it would
// be a signal.
void touch(std::byte* data, std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  madvise(data, size, MADV_HUGEPAGE);  // a hint that may fail
  if (madvise(data, size, MADV_POPULATE_WRITE) == 0) {
    return;
  }
  if (errno != EINVAL) {
    throw failed("touching " + std::to_string(bytes) + " bytes");
  }
  for (std::int64_t at = 0; at < bytes; at += whole_pages(1)) {  // before Linux 5.14
    *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
}

Memory::Deleter unmapping(std::int64_t bytes, std::shared_ptr<SharedFile> file = nullptr) {
  return [bytes, file = std::move(file)](std::byte* data) {
    munmap(data, static_cast<std::size_t>(bytes));
  };
}

// Whether a part of this many bytes that begins with a page lies within memory of this size. The
// numbers may come from another process.
bool lies_within(std::int64_t size, std::int64_t offset, std::int64_t bytes) {
  return offset >= 0 && bytes >= 0 && offset % whole_pages(1) == 0 && offset <= size &&
         bytes <= size - offset;
}

std::string path_of(const SharedAddress& address) {
  return "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
}

// Opens the file through /proc. If that is forbidden, borrows a descriptor from its owner.
File open_file(const SharedAddress& address) {
  File file(open(path_of(address).c_str(), O_RDWR | O_CLOEXEC));
  if (file.fd() >= 0) {
    return file;
  }
  const SharedMemoryError refused = failed("open " + path_of(address));
  try {
    return File(borrow_descriptor(address.pid, address.fd, address.inode));
  } catch (const SharedMemoryError& error) {
    throw SharedMemoryError(std::string(refused.what()) + "; " + error.what());
  }
}

}  // namespace

std::int64_t whole_pages(std::int64_t n) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  return checked_mul((checked_add(n, page) - 1) / page, page);
}

std::string shared_memory_why_not() {
  try {
    const auto memory = share_memory(1);
    attach_memory(*memory->address());
  } catch (const std::exception& error) {
    return error.what();
  }
  const std::string why_not = lender_why_not();
  if (!why_not.empty() && prctl(PR_GET_DUMPABLE) != 1 && geteuid() != 0) {
    return "shared memory: this process is not dumpable, so other processes cannot open its "
           "files; " +
           why_not;
  }
  return "";
}

namespace {

// Creates shared memory whose pages are not allocated yet.
std::shared_ptr<Memory> reserve(std::int64_t bytes) {
  const std::int64_t size = whole_pages(std::max<std::int64_t>(bytes, 1));
  check_available(size);
  File file = create_file();
  if (ftruncate(file.fd(), static_cast<off_t>(size)) != 0) {
    throw failed("ftruncate to " + std::to_string(size) + " bytes");
  }
  // The seals prevent a process from shrinking the file while others have mapped it.
  if (fcntl(file.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw failed("fcntl(F_ADD_SEALS)");
  }
  const SharedAddress address{getpid(), file.fd(), status_of(file).st_ino, 0, bytes};
  std::byte* data = map(file.fd(), 0, size, 0);
  auto lent = std::make_shared<SharedFile>(std::move(file));
  return std::make_shared<Memory>(data, bytes, unmapping(size, std::move(lent)), address);
}

}  // namespace

std::shared_ptr<Memory> share_memory(std::int64_t bytes) {
  auto memory = reserve(bytes);
  touch(memory->data(), bytes);
  return memory;
}

std::shared_ptr<Memory> share_copy(std::span<const std::byte> bytes) {
  auto memory = reserve(static_cast<std::int64_t>(bytes.size()));
  const auto fd = static_cast<int>(memory->address()->fd);
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      throw failed("write of " + std::to_string(bytes.size()) + " bytes");
    }
  }
  return memory;
}

std::shared_ptr<Memory> part_of(const std::shared_ptr<Memory>& memory, std::int64_t offset,
                                std::int64_t bytes) {
  if (!memory->address() || !lies_within(memory->bytes(), offset, bytes)) {
    throw std::invalid_argument("part: expected whole pages within shared memory of " +
                                std::to_string(memory->bytes()) + " bytes, got offset " +
                                std::to_string(offset) + " and " + std::to_string(bytes) +
                                " bytes");
  }
  SharedAddress address = *memory->address();
  address.offset += offset;
  address.bytes = bytes;
  return std::make_shared<Memory>(memory->data() + offset, bytes, [memory](std::byte*) {}, address);
}

std::shared_ptr<Memory> attach_memory(const SharedAddress& address) {
  const File file = open_file(address);
  const struct stat status = status_of(file);
  const std::int64_t offset = address.offset;
  if (status.st_ino != address.inode || !lies_within(status.st_size, offset, address.bytes)) {
    throw SharedMemoryError("shared memory: " + path_of(address) +
                            " no longer refers to this memory; its creator has released it");
  }
  const std::int64_t size = whole_pages(std::max<std::int64_t>(address.bytes, 1));
  std::byte* data = map(file.fd(), offset, size, MAP_POPULATE);
  return std::make_shared<Memory>(data, address.bytes, unmapping(size), address);
}

}  // namespace pycollect::inline PYCOLLECT_ABI
