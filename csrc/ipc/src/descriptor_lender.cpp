#include "descriptor_lender.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "deaf_thread.h"
#include "file.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

constexpr timeval kServerPatience{1, 0};  // with one who has connected and does not ask
constexpr timeval kClientPatience{10, 0};
constexpr useconds_t kRetryMicroseconds = 10000;

struct Request {
  std::int64_t fd;
  std::uint64_t inode;
};

// Under which a process is found. Process ids mean something in one namespace only, while several
// of these may share their sockets.
std::pair<sockaddr_un, socklen_t> name_of(std::int64_t pid) {
  struct stat space{};
  stat("/proc/self/ns/pid", &space);  // 0 where there is no /proc
  const std::string name = "pycollect-" + std::to_string(space.st_ino) + "-" + std::to_string(pid);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1);  // it begins with a zero: no file
  return {address, offsetof(sockaddr_un, sun_path) + 1 + static_cast<socklen_t>(name.size())};
}

File unix_socket() {
  File file(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (file.fd() < 0) {
    throw failed("socket");
  }
  return file;
}

void set_patience(const File& socket, const timeval& patience) {
  setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(socket.fd(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
}

ucred peer_of(const File& socket) {
  ucred peer{-1, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  socklen_t size = sizeof(peer);
  getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &size);
  return peer;
}

// A message of one byte with room for one descriptor beside it.
struct Parcel {
  Parcel() {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
  }
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;

  cmsghdr* make_room() {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    return CMSG_FIRSTHDR(&message);
  }

  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
  msghdr message{};
};

void send_descriptor(const File& socket, int fd) {
  Parcel parcel;
  cmsghdr* header = parcel.make_room();
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(fd));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  sendmsg(socket.fd(), &parcel.message, MSG_NOSIGNAL);
}

int receive_descriptor(const File& socket) {
  Parcel parcel;
  parcel.make_room();
  const ssize_t count = recvmsg(socket.fd(), &parcel.message, MSG_CMSG_CLOEXEC);
  const cmsghdr* header = count > 0 ? CMSG_FIRSTHDR(&parcel.message) : nullptr;
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    return -1;
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
  return fd;
}

class Lender {
 public:
  Lender() {
    try {
      start();
    } catch (const std::exception& error) {
      why_not_ = error.what();
    }
  }

  void lend(int fd, std::uint64_t inode) {
    std::lock_guard lock(mutex_);
    lent_[fd] = inode;
  }
  void take_back(int fd) {
    std::lock_guard lock(mutex_);
    lent_.erase(fd);
  }
  const std::string& why_not() const { return why_not_; }
  int listening() const { return listening_.fd(); }

 private:
  void start() {
    File listening = unix_socket();
    const auto [address, size] = name_of(getpid());
    if (bind(listening.fd(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
      throw failed("bind");
    }
    if (listen(listening.fd(), SOMAXCONN) != 0) {
      throw failed("listen");
    }
    listening_ = std::move(listening);
    start_deaf_thread([this] { serve(); });
  }

  [[noreturn]] void serve() {
    for (;;) {
      const File client(accept4(listening_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      if (client.fd() >= 0) {
        answer(client);
      } else {  // no descriptor is free, for one
        usleep(kRetryMicroseconds);
      }
    }
  }

  void answer(const File& client) {
    const uid_t user = peer_of(client).uid;
    if (user != geteuid() && user != 0) {
      return;
    }
    set_patience(client, kServerPatience);
    Request request{};
    if (recv(client.fd(), &request, sizeof(request), 0) != sizeof(request)) {
      return;
    }
    std::lock_guard lock(mutex_);  // it is not closed meanwhile
    const auto found = lent_.find(static_cast<int>(request.fd));
    if (found != lent_.end() && found->second == request.inode) {
      send_descriptor(client, found->first);
    }
  }

  std::mutex mutex_;
  std::map<int, std::uint64_t> lent_;
  File listening_{-1};
  std::string why_not_;
};

// This process's, which its thread uses until the very end: never deleted.
std::atomic<Lender*> lender{nullptr};
std::atomic<int> listening_fd{-1};
std::mutex lender_mutex;

// The child of a fork does not have the lender's thread, and must not look like its parent. It
// makes a lender of its own when it needs one. A fork waits while another thread makes the first
// lender: the child would otherwise have a mutex that stays locked.
[[maybe_unused]] const int fork_handler_of_lenders =
    pthread_atfork([] { lender_mutex.lock(); }, [] { lender_mutex.unlock(); },
                   [] {
                     lender.store(nullptr);
                     if (const int fd = listening_fd.exchange(-1); fd >= 0) {
                       close(fd);
                     }
                     lender_mutex.unlock();
                   });

Lender& this_process() {
  Lender* own = lender.load();
  if (own == nullptr) {
    const std::lock_guard lock(lender_mutex);
    own = lender.load();
    if (own == nullptr) {
      own = new Lender();
      listening_fd.store(own->listening());
      lender.store(own);
    }
  }
  return *own;
}

}  // namespace

void lend_descriptor(int fd, std::uint64_t inode) { this_process().lend(fd, inode); }

void take_back_descriptor(int fd) {
  if (Lender* own = lender.load()) {
    own->take_back(fd);
  }
}

std::string lender_why_not() { return this_process().why_not(); }

int borrow_descriptor(std::int64_t pid, std::int64_t fd, std::uint64_t inode) {
  const File server = unix_socket();
  set_patience(server, kClientPatience);
  const auto [address, size] = name_of(pid);
  if (connect(server.fd(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    throw failed("connect to process " + std::to_string(pid));
  }
  if (peer_of(server).pid != pid) {  // whoever took its name
    throw SharedMemoryError("shared memory: process " + std::to_string(peer_of(server).pid) +
                            " answered instead of process " + std::to_string(pid));
  }
  const Request request{fd, inode};
  if (send(server.fd(), &request, sizeof(request), MSG_NOSIGNAL) != sizeof(request)) {
    throw failed("send to process " + std::to_string(pid));
  }
  const int borrowed = receive_descriptor(server);
  if (borrowed < 0) {
    throw SharedMemoryError("shared memory: process " + std::to_string(pid) +
                            " refused to share its descriptor " + std::to_string(fd));
  }
  return borrowed;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
