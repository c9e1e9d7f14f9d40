// Two processes that wake each other by a futex. Each line of input is a number of round trips; a
// line of output follows when they are done. The program ends with its input.
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <new>

namespace {

struct alignas(64) Word {
  std::atomic<unsigned> value{0};

  void wait(unsigned seen) {
    while (value.load() == seen) {
      syscall(SYS_futex, &value, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    }
  }
  void ring() {
    value.fetch_add(1);
    syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const long trips = argc > 1 ? std::atol(argv[1]) : 1;
  void* shared =
      mmap(nullptr, 2 * sizeof(Word), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    return 1;
  }
  auto* words = new (shared) Word[2];
  const pid_t other = fork();
  if (other == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (unsigned n = 0;; ++n) {
      words[0].wait(n);
      words[1].ring();
    }
  }
  unsigned n = 0;
  while (std::getchar() != EOF) {
    for (long trip = 0; trip < trips; ++trip, ++n) {
      words[0].ring();
      words[1].wait(n);
    }
    std::puts("done");
    std::fflush(stdout);
  }
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
}
