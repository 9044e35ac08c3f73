// What a command to several processes could go through otherwise, and what it costs at least: bare
// futexes (the floor), Unix sockets and pipes; and the calls of host_driver.cpp for one page, timed
// in each process.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>

namespace {

constexpr std::size_t kMaxRanks = 64, kMessageBytes = 64;
constexpr std::size_t kHuge = std::size_t{2} << 20, kSystemPage = 4096, kRangePages = 4;
constexpr int kPopulateWrite = 23, kCollapse = 25;

using Word = std::atomic<std::uint32_t>;

/// One bell to all, a count down, one bell back.
struct Bells {
  alignas(64) Word posted;
  alignas(64) Word left;
  alignas(64) Word answered;
};

struct Shared {
  Bells nothing;  // a command that asks for nothing
  Bells page;     // odd: map a page, even: unmap it
  struct alignas(64) Span {
    std::int64_t begin_ns, end_ns;
  } spans[kMaxRanks];
};

Shared* shared(void* at) {
  return static_cast<Shared*>(at);
}

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void require(bool done, const char* what) {
  if (done) return;
  std::perror(what);
  std::abort();
}

void wait_while(Word& word, std::uint32_t seen) {
  while (word.load() == seen) syscall(SYS_futex, &word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
}

void ring(Bells& bells, std::uint32_t ranks) {
  bells.left = ranks;
  const std::uint32_t command = bells.posted.load() + 1;
  bells.posted = command;
  syscall(SYS_futex, &bells.posted, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  for (;;) {
    const std::uint32_t answered = bells.answered.load();
    if (answered == command) return;
    wait_while(bells.answered, answered);
  }
}

/// Carries out commands for ever.
template <typename F>
void serve(Bells& bells, F command) {
  for (std::uint32_t seen = bells.posted.load();;) {
    wait_while(bells.posted, seen);
    command(++seen);
    if (bells.left.fetch_sub(1) != 1) continue;
    bells.answered = seen;
    syscall(SYS_futex, &bells.answered, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
}

void* map_nothing(void* at, std::size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at != nullptr ? MAP_FIXED : 0);
  void* there = mmap(at, bytes, PROT_NONE, flags, -1, 0);
  require(there != MAP_FAILED, "mmap");
  return there;
}

/// Addresses for huge pages, from as many calls as AlignedAddresses makes.
char* reserve(std::size_t bytes) {
  char* raw = static_cast<char*>(map_nothing(nullptr, bytes + kHuge));
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(raw) % kHuge;
  const std::size_t head = misaligned == 0 ? 0 : kHuge - misaligned;
  if (head > 0) munmap(raw, head);
  munmap(raw + head + bytes, kHuge - head);
  return raw + head;
}

void map_file(char* at, int file, std::size_t offset) {
  void* there = mmap(at, kHuge, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                     static_cast<off_t>(offset));
  require(there != MAP_FAILED, "mmap of the file");
}

/// Page `index` of the file and of the range.
void map_page(int file, char* range, std::size_t index) {
  getpid();  // the driver does not serve a forked child
  char* window = reserve(kHuge);
  map_file(window, file, index * kHuge);
  require(madvise(window, kSystemPage, kPopulateWrite) == 0, "populate");
  if (madvise(window, kHuge, kCollapse) != 0) {
    require(madvise(window, kHuge, kPopulateWrite) == 0, "populate");
  }
  munmap(window, kHuge);
  map_file(range + index * kHuge, file, index * kHuge);
}

void unmap_page(int file, char* range, std::size_t index) {
  map_nothing(range + index * kHuge, kHuge);
  getpid();
  require(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(index * kHuge), kHuge) == 0,
          "punch");
}

void send(int fd) {
  char message[kMessageBytes] = {};
  require(write(fd, message, sizeof message) == sizeof message, "write");
}

bool receive(int fd) {
  char message[kMessageBytes];
  for (std::size_t got = 0; got < sizeof message;) {
    const ssize_t more = read(fd, message + got, sizeof message - got);
    if (more <= 0) return false;
    got += static_cast<std::size_t>(more);
  }
  return true;
}

/// Microseconds of each of `count` calls, `pause_us` apart.
template <typename F>
void time_each(std::uint32_t count, std::uint32_t pause_us, double* out, F call) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (pause_us > 0) usleep(pause_us);
    const std::int64_t begin = now_ns();
    call();
    out[i] = static_cast<double>(now_ns() - begin) / 1000;
  }
}

}  // namespace

extern "C" {

std::uint64_t shared_bytes() {
  return sizeof(Shared);
}

void make(void* at) {
  new (at) Shared{};
}

// --- the workers' side; none of these returns ---

void serve_bells(void* at) {
  serve(shared(at)->nothing, [](std::uint32_t) {});
}

void serve_pages(void* at, std::uint32_t rank) {
  const int file = memfd_create("bench-ring", MFD_CLOEXEC);
  require(file >= 0 && ftruncate(file, kRangePages * kHuge) == 0, "memfd");
  // As the pool's range: the null block's page stays mapped, and its neighbour comes and goes.
  char* range = reserve(kRangePages * kHuge);
  map_page(file, range, 0);
  Shared::Span& span = shared(at)->spans[rank];
  serve(shared(at)->page, [&](std::uint32_t command) {
    span.begin_ns = now_ns();
    command % 2 == 1 ? map_page(file, range, 1) : unmap_page(file, range, 1);
    span.end_ns = now_ns();
  });
}

void serve_stream(int in, int out) {
  while (receive(in)) send(out);
}

// --- the scheduler's side ---

void time_bells(void* at, std::uint32_t ranks, std::uint32_t count, std::uint32_t pause_us,
                double* out) {
  time_each(count, pause_us, out, [&] { ring(shared(at)->nothing, ranks); });
}

/// Microseconds from the first that begins to the last that ends, and of the whole round.
void time_page(void* at, std::uint32_t ranks, double* span_us, double* round_us) {
  time_each(1, 0, round_us, [&] { ring(shared(at)->page, ranks); });
  const Shared::Span* spans = shared(at)->spans;
  std::int64_t begin = spans[0].begin_ns, end = spans[0].end_ns;
  for (std::uint32_t rank = 1; rank < ranks; ++rank) {
    begin = std::min(begin, spans[rank].begin_ns);
    end = std::max(end, spans[rank].end_ns);
  }
  *span_us = static_cast<double>(end - begin) / 1000;
}

/// A message to each and its answer: all are asked and then all are heard, or one after another.
void time_streams(const int* in, const int* out, std::uint32_t ranks, bool at_once,
                  std::uint32_t count, std::uint32_t pause_us, double* samples) {
  time_each(count, pause_us, samples, [&] {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      send(out[rank]);
      if (!at_once) require(receive(in[rank]), "read");
    }
    for (std::uint32_t rank = 0; at_once && rank < ranks; ++rank)
      require(receive(in[rank]), "read");
  });
}
}
