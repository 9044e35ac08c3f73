// Records into files and back, by io_uring and by threads: the same of both.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "tiers/record_io.h"

namespace kvelastic {
namespace {

constexpr std::size_t kRecord = 64 * 1024;

/// A file of zeros under /var/tmp, where O_DIRECT is available; gone with this.
class File {
 public:
  explicit File(std::uint64_t bytes, int flags = 0) {
    std::string path = "/var/tmp/kvtest_records_XXXXXX";
    const int made = ::mkstemp(path.data());
    fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | flags);
    ::unlink(path.c_str());
    ::close(made);
    CHECK(fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd >= 0) ::close(fd);
  }

  int fd = -1;
};

/// Memory of several records, aligned or not.
class Memory {
 public:
  Memory(std::size_t count, std::size_t bytes, std::size_t shift = 0)
      : bytes_(bytes),
        shift_(shift),
        memory_(static_cast<std::byte*>(
                    std::aligned_alloc(kDirectAlignment, (count * bytes + 8191) & ~4095ull)),
                &std::free) {}

  std::byte* at(std::size_t record) { return memory_.get() + shift_ + record * bytes_; }
  void stamp(std::size_t record, unsigned salt) {
    std::uint64_t state = record * 1000003 + salt;
    for (std::size_t i = 0; i < bytes_; ++i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      at(record)[i] = static_cast<std::byte>(state >> 56);
    }
  }

 private:
  std::size_t bytes_;
  std::size_t shift_;
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
};

RecordKey key_of(std::size_t number) {
  RecordKey key{};
  std::memcpy(key.data(), &number, sizeof number);
  return key;
}

std::vector<RecordPiece> pieces_of(int fd, Memory& memory, std::size_t count, std::size_t bytes,
                                   std::uint64_t stride) {
  std::vector<RecordPiece> pieces;
  for (std::size_t i = 0; i < count; ++i) {
    pieces.push_back(
        {.fd = fd, .offset = i * stride, .data = memory.at(i), .bytes = bytes, .key = key_of(i)});
  }
  return pieces;
}

/// Every engine that this machine has.
std::vector<std::unique_ptr<RecordIo>> engines(unsigned depth) {
  std::vector<std::unique_ptr<RecordIo>> all;
  for (const EngineChoice choice : {EngineChoice::kThreads, EngineChoice::kUring}) {
    auto io = RecordIo::create(choice, depth);
    if (io) {
      all.push_back(std::move(*io));
    } else {
      CHECK(choice == EngineChoice::kUring && io.error().code == Errc::kDeviceUnavailable);
      std::fprintf(stderr, "%s\n", io.error().message.c_str());
    }
  }
  return all;
}

}  // namespace

TEST(record_io_reads_back_written_bytes) {
  constexpr std::size_t kCount = 50;
  for (const int flags : {0, O_DIRECT}) {
    for (const std::size_t odd : {0, 1}) {
      for (auto& io : engines(8)) {
        const std::size_t bytes = kRecord - odd * 100;
        File file(kCount * kRecord, flags);
        if (file.fd < 0) continue;  // no O_DIRECT here
        Memory out(kCount, bytes, odd * 3);
        Memory in(kCount, bytes, odd * 5);
        for (std::size_t i = 0; i < kCount; ++i) out.stamp(i, 1);
        auto written = pieces_of(file.fd, out, kCount, bytes, kRecord);
        io->run(Way::kWrite, written);
        auto read = pieces_of(file.fd, in, kCount, bytes, kRecord);
        io->run(Way::kRead, read);
        for (std::size_t i = 0; i < kCount; ++i) {
          CHECK(written[i].result == static_cast<std::int64_t>(bytes));
          CHECK(read[i].result == static_cast<std::int64_t>(bytes));
          CHECK(written[i].checksum == record_checksum({out.at(i), bytes}, key_of(i)));
          CHECK(read[i].checksum == written[i].checksum);
          CHECK(std::memcmp(in.at(i), out.at(i), bytes) == 0);
        }
      }
    }
  }
}

TEST(record_io_returns_a_result_per_piece) {
  for (auto& io : engines(4)) {
    File file(2 * kRecord + 4096);
    Memory memory(4, kRecord);
    auto pieces = pieces_of(file.fd, memory, 4, kRecord, kRecord);
    pieces[0].fd = -1;
    io->run(Way::kRead, pieces);
    CHECK(pieces[0].result == -EBADF);
    CHECK(pieces[1].result == static_cast<std::int64_t>(kRecord));
    CHECK(pieces[2].result == 4096);  // the file ends there
    CHECK(pieces[3].result == 0);
    const int read_only = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (RecordPiece& piece : pieces) piece.fd = read_only;
    io->run(Way::kWrite, pieces);
    for (const RecordPiece& piece : pieces) CHECK(piece.result == -EBADF);
    ::close(read_only);
    io->run(Way::kRead, {});
  }
}

TEST(record_io_serves_concurrent_threads) {
  constexpr std::size_t kThreads = 12;  // more than there are rings
  constexpr std::size_t kCount = 20;
  for (auto& io : engines(4)) {
    File file(kThreads * kCount * kRecord);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        Memory out(kCount, kRecord);
        Memory in(kCount, kRecord);
        for (std::size_t i = 0; i < kCount; ++i) out.stamp(i, static_cast<unsigned>(t));
        auto pieces = pieces_of(file.fd, out, kCount, kRecord, kRecord);
        for (RecordPiece& piece : pieces) piece.offset += t * kCount * kRecord;
        io->run(Way::kWrite, pieces);
        for (std::size_t i = 0; i < kCount; ++i) pieces[i].data = in.at(i);
        io->run(Way::kRead, pieces);
        for (std::size_t i = 0; i < kCount; ++i) {
          CHECK(std::memcmp(in.at(i), out.at(i), kRecord) == 0);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(record_io_can_be_destroyed_in_forked_child) {
  for (auto& io : engines(4)) {
    File file(8 * kRecord);
    Memory memory(8, kRecord);
    auto pieces = pieces_of(file.fd, memory, 8, kRecord, kRecord);
    io->run(Way::kRead, pieces);
    const pid_t pid = ::fork();
    if (pid == 0) {
      const bool own = io->made_by().is_this();
      io.reset();
      ::_exit(own ? 1 : 0);
    }
    int status = 0;
    CHECK(::waitpid(pid, &status, 0) == pid && status == 0);
    io->run(Way::kRead, pieces);
    CHECK(pieces[7].result == static_cast<std::int64_t>(kRecord));
  }
}

TEST(record_io_refuses_invalid_queue_depths) {
  CHECK(RecordIo::create(EngineChoice::kAuto, 0).error().code == Errc::kInvalidArgument);
  CHECK(RecordIo::create(EngineChoice::kAuto, 257).error().code == Errc::kInvalidArgument);
}

TEST(record_checksum_detects_bit_flips_keys_and_swaps) {
  constexpr std::size_t kBytes = 200;
  std::vector<std::byte> bytes(kBytes, std::byte{0});  // zeros: the worst for products
  const std::uint64_t whole = record_checksum(bytes, key_of(1));
  for (std::size_t bit = 0; bit < kBytes * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    CHECK(record_checksum(bytes, key_of(1)) != whole);
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
  CHECK(record_checksum(bytes, key_of(1)) == whole);
  CHECK(record_checksum(bytes, key_of(2)) != whole);
  CHECK(record_checksum({bytes.data(), kBytes - 1}, key_of(1)) != whole);
  // Pieces of 64 bytes, and of 16, that change places.
  for (std::size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<std::byte>(i);
  const std::uint64_t ordered = record_checksum(bytes, key_of(1));
  for (const std::size_t piece : {16, 64}) {
    std::vector<std::byte> moved = bytes;
    std::swap_ranges(moved.begin(), moved.begin() + static_cast<std::ptrdiff_t>(piece),
                     moved.begin() + static_cast<std::ptrdiff_t>(piece));
    CHECK(record_checksum(moved, key_of(1)) != ordered);
  }
}

TEST(zeroed_file_ranges_read_as_zeros) {
  File file(0);
  std::vector<std::byte> bytes(16 * 4096, std::byte{7});
  REQUIRE(::pwrite(file.fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  CHECK(zero_range(file.fd, 4096, 4096) == 0);
  CHECK(release_range(file.fd, 3 * 4096, 4096) == 0);
  REQUIRE(::pread(file.fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  CHECK(bytes[4095] == std::byte{7} && bytes[4096] == std::byte{0} && bytes[8191] == std::byte{0});
  CHECK(bytes[8192] == std::byte{7} && bytes[3 * 4096] == std::byte{0});
  CHECK(zero_range(-1, 0, 4096) == EBADF && release_range(-1, 0, 4096) == EBADF);
}

}  // namespace kvelastic
