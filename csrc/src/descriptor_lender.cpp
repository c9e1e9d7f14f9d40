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

constexpr timeval kServerTimeout{1, 0};  // for clients that connect but send no request
constexpr timeval kClientTimeout{10, 0};
constexpr useconds_t kRetryMicroseconds = 10000;

struct Request {
  std::int64_t fd;
  std::uint64_t inode;
};

// Socket address of a process. It includes the pid namespace because process ids are unique only in
// one namespace, and several namespaces may share their sockets.
std::pair<sockaddr_un, socklen_t> name_of(std::int64_t pid) {
  struct stat space{};
  stat("/proc/self/ns/pid", &space);  // st_ino remains 0 without /proc
  const std::string name = "pycollect-" + std::to_string(space.st_ino) + "-" + std::to_string(pid);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1);  // a leading zero: an abstract name
  return {address, offsetof(sockaddr_un, sun_path) + 1 + static_cast<socklen_t>(name.size())};
}

File unix_socket() {
  File file(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (file.fd() < 0) {
    throw failed("socket");
  }
  return file;
}

void set_timeout(const File& socket, const timeval& timeout) {
  setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  setsockopt(socket.fd(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
}

ucred peer_of(const File& socket) {
  ucred peer{-1, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  socklen_t size = sizeof(peer);
  getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &size);
  return peer;
}

// A message of one byte, with space for one descriptor.
struct DescriptorMessage {
  DescriptorMessage() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  cmsghdr* add_control() {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    return CMSG_FIRSTHDR(&header);
  }

  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
  msghdr header{};
};

void send_descriptor(const File& socket, int fd) {
  DescriptorMessage message;
  cmsghdr* header = message.add_control();
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(fd));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  sendmsg(socket.fd(), &message.header, MSG_NOSIGNAL);
}

int receive_descriptor(const File& socket) {
  DescriptorMessage message;
  message.add_control();
  const ssize_t count = recvmsg(socket.fd(), &message.header, MSG_CMSG_CLOEXEC);
  const cmsghdr* header = count > 0 ? CMSG_FIRSTHDR(&message.header) : nullptr;
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
      } else {  // for example, no descriptor is free
        usleep(kRetryMicroseconds);
      }
    }
  }

  void answer(const File& client) {
    const uid_t user = peer_of(client).uid;
    if (user != geteuid() && user != 0) {
      return;
    }
    set_timeout(client, kServerTimeout);
    Request request{};
    if (recv(client.fd(), &request, sizeof(request), 0) != sizeof(request)) {
      return;
    }
    std::lock_guard lock(mutex_);  // keeps the descriptor open until it is sent
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

// The lender of this process. Never deleted: its thread uses it until the process ends.
std::atomic<Lender*> lender{nullptr};
std::atomic<int> listening_fd{-1};
std::mutex lender_mutex;

// A forked child has no lender thread and must not answer as its parent. It makes its own lender
// when it needs one. A fork waits until another thread has made the first lender; otherwise the
// child would inherit a locked mutex.
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
  set_timeout(server, kClientTimeout);
  const auto [address, size] = name_of(pid);
  if (connect(server.fd(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    throw failed("connect to process " + std::to_string(pid));
  }
  if (peer_of(server).pid != pid) {  // another process has bound the name
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
