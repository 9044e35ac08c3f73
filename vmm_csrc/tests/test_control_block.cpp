#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "segment/control_block.h"
#include "segment/control_block_copy.h"

namespace kvelastic {
namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;

/// A shared mapping, as a segment's file would be.
class Memory {
 public:
  explicit Memory(std::size_t bytes = kSegmentBytes)
      : bytes_(bytes),
        start_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { munmap(start_, bytes_); }
  std::span<std::byte> span() const { return {static_cast<std::byte*>(start_), bytes_}; }
  void forbid_writing() const { mprotect(start_, bytes_, PROT_READ); }

 private:
  std::size_t bytes_;
  void* start_;
};

ControlBlockIdentity somebody() {
  ControlBlockIdentity identity;
  identity.uuid.fill(7);
  identity.owner_pid = 42;
  identity.owner_start_ticks = 4711;
  identity.name = "kvelastic_test_42";
  identity.engine = "test";
  identity.model = "org/model";
  identity.devices = {{"host", 1}};
  return identity;
}

std::unique_ptr<ControlBlockOwner> make(const Memory& memory) {
  auto owner = ControlBlockOwner::create(memory.span(), somebody());
  CHECK(owner);
  return *std::move(owner);
}

TEST(control_block_keeps_its_identity) {
  const Memory memory;
  const auto owner = make(memory);
  const auto view = ControlBlockView::open(memory.span());
  REQUIRE(view);
  const ControlBlockHeader& header = (*view).header();
  CHECK(text_of(header.name) == "kvelastic_test_42");
  CHECK(text_of(header.model) == "org/model");
  CHECK(header.owner_pid == 42 && header.owner_start_ticks == 4711);
  CHECK(header.total_bytes == kSegmentBytes && header.ring_bytes == kRingAreaBytes);
  CHECK((*view).state() == InstanceState::kAlive);
  owner->set_state(InstanceState::kClosing);
  CHECK((*view).state() == InstanceState::kClosing);
  CHECK(owner->ring_area().size() == kRingAreaBytes);
}

TEST(control_block_magic_reads_as_text) {
  CHECK(std::memcmp(&kControlBlockMagic, "KVELASTC", 8) == 0);
}

TEST(control_block_refuses_overlong_texts) {
  const Memory memory;
  ControlBlockIdentity identity = somebody();
  identity.name = std::string(64, 'n');
  auto owner = ControlBlockOwner::create(memory.span(), identity);
  REQUIRE(owner);
  CHECK(text_of((*owner)->header().name) == identity.name);
  identity.name += 'n';
  CHECK(!ControlBlockOwner::create(memory.span(), identity));
  identity.name = std::string("a\0b", 3);
  CHECK(!ControlBlockOwner::create(memory.span(), identity));
}

TEST(control_block_needs_size_and_alignment) {
  const Memory memory(kSegmentBytes + 4096);
  const auto small = ControlBlockOwner::create(memory.span().first(kSegmentBytes - 1), somebody());
  CHECK(!small && small.error().code == Errc::kInvalidArgument);
  CHECK(!ControlBlockOwner::create(memory.span().subspan(8), somebody()));
  const auto owner = make(memory);
  std::memmove(memory.span().data() + 8, memory.span().data(), kSegmentBytes);
  const auto view = ControlBlockView::open(memory.span().subspan(8));
  CHECK(!view && view.error().code == Errc::kInvalidArgument);
}

TEST(control_block_refuses_malformed_bytes) {
  const Memory memory;
  const auto owner = make(memory);
  for (std::size_t bytes = 0; bytes < kSegmentBytes; bytes += bytes < 700 ? 1 : 4093) {
    const auto view = ControlBlockView::open(memory.span().first(bytes));
    CHECK(!view && view.error().code == Errc::kSegmentFormat);
    CHECK(!RequestWriter::open(memory.span().first(bytes)));
  }
  for (std::size_t bit = 0; bit < sizeof(ControlBlockHeader) * 8; ++bit) {
    std::byte& byte = memory.span()[bit / 8];
    byte ^= std::byte{1} << (bit % 8);
    CHECK(!ControlBlockView::open(memory.span()));
    byte ^= std::byte{1} << (bit % 8);
  }
  CHECK(ControlBlockView::open(memory.span()));
}

TEST(control_block_refuses_random_bytes) {
  const Memory memory;
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    for (std::size_t i = 0; i < kControlBlockBytes; i += 8) {
      const std::uint64_t word = random();
      std::memcpy(memory.span().data() + i, &word, 8);
    }
    if (round % 2 == 0) std::memcpy(memory.span().data(), &kControlBlockMagic, 8);
    CHECK(!ControlBlockView::open(memory.span()));
  }
}

TEST(control_block_tolerates_random_mutable_fields) {
  const Memory memory;
  const auto owner = make(memory);
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    for (std::size_t i = sizeof(ControlBlockHeader); i < kControlBlockBytes; i += 8) {
      const std::uint64_t word = random();
      std::memcpy(memory.span().data() + i, &word, 8);
    }
    const auto view = ControlBlockView::open(memory.span());
    REQUIRE(view);
    Request request;
    Ack ack;
    Usage usage;
    CHECK((*view).read_request(request));
    CHECK((*view).read_ack(ack));
    CHECK((*view).read_usage(usage));
    (void)(*view).wait_ack(random(), true, 0);
    CHECK(text_of(ack.reason).size() <= ack.reason.size());
    (void)(*view).state();
    (void)owner->read_request();
    auto writer = RequestWriter::open(memory.span());
    REQUIRE(writer);
    const std::uint64_t revision = writer->write({.limit_bytes = 3});
    CHECK(owner->request_revision() == revision);
  }
}

TEST(control_block_reader_writes_nothing) {
  const Memory memory;
  const auto owner = make(memory);
  owner->publish_usage({.mapped_bytes = 5});
  owner->acknowledge({.revision = 0, .state = AckState::kApplied});
  memory.forbid_writing();  // from here on a write is a SIGSEGV
  const auto view = ControlBlockView::open(memory.span());
  REQUIRE(view);
  Usage usage;
  CHECK((*view).read_usage(usage) && usage.mapped_bytes == 5);
  CHECK((*view).wait_ack(0, true, 0));
  CHECK(!(*view).wait_ack(1, true, 1'000'000));
  CHECK((*view).counter(Counter::kAllocs) == 0);
}

TEST(control_block_request_and_acknowledgement) {
  const Memory memory;
  const auto owner = make(memory);
  CHECK(!owner->read_request());
  auto writer = RequestWriter::open(memory.span());
  REQUIRE(writer);
  const std::uint32_t seen = owner->bell();
  CHECK(writer->write({.limit_bytes = 0}) == 1);
  CHECK(owner->bell() != seen && owner->wait_bell(seen, 0));
  auto request = owner->read_request();
  REQUIRE(request);
  CHECK(request->limit_revision == 1 && request->limit_bytes == 0 && request->revision == 1);
  CHECK(writer->write({.trim = true}) == 2);
  request = owner->read_request();
  REQUIRE(request);
  CHECK(request->limit_bytes == 0 && request->trim_revision == 2 && request->revision == 2);

  const auto view = ControlBlockView::open(memory.span());
  REQUIRE(view);
  CHECK(!(*view).wait_ack(2, false, 0));
  owner->acknowledge({.revision = 2, .over_bytes = 9, .state = AckState::kShrinking});
  CHECK((*view).wait_ack(2, false, 0));
  CHECK(!(*view).wait_ack(2, true, 0));
  owner->acknowledge({.revision = 2, .state = AckState::kRefused}, std::string(500, 'r'));
  CHECK((*view).wait_ack(2, true, 0));
  Ack ack;
  REQUIRE((*view).read_ack(ack));
  CHECK((*view).reason_of(ack) == std::string(kReasonBytes - 3, 'r') + "...");
  const Ack earlier = ack;
  owner->acknowledge({.revision = 2, .state = AckState::kRefused}, std::string(200, 's'));
  CHECK((*view).reason_of(earlier) == std::string(125, 'r') + "...");
  REQUIRE((*view).read_ack(ack));
  CHECK((*view).reason_of(ack) == std::string(200, 's'));
  owner->acknowledge({.revision = 2, .state = AckState::kRefused}, "short");
  REQUIRE((*view).read_ack(ack));
  CHECK((*view).reason_of(ack) == "short");
}

TEST(control_block_ignores_a_partial_request) {
  const Memory memory;
  const auto owner = make(memory);
  auto writer = RequestWriter::open(memory.span());
  REQUIRE(writer);
  writer->write({.limit_bytes = 11, .priority = 4});
  writer->write_half({.limit_bytes = 22, .priority = 5});
  const auto request = owner->read_request();
  REQUIRE(request);
  CHECK(request->revision == 1 && request->limit_bytes == 11 && request->priority == 4);
  CHECK(writer->write({.limit_bytes = 33}) == 2);
  const auto next = owner->read_request();
  REQUIRE(next);
  CHECK(next->limit_bytes == 33 && next->priority == 4);
}

TEST(control_block_bell_wakes_another_process) {
  const Memory memory;
  const auto owner = make(memory);
  const std::uint32_t seen = owner->bell();
  CHECK(!owner->wait_bell(seen, 1'000'000));
  const pid_t child = fork();
  if (child == 0) {
    auto writer = RequestWriter::open(memory.span());
    if (writer) writer->write({.limit_bytes = 77});
    const auto view = ControlBlockView::open(memory.span());
    const bool answered = view && (*view).wait_ack(1, true, 60 * kSecondNs);
    _exit(answered ? 0 : 1);
  }
  REQUIRE(child > 0);
  CHECK(owner->wait_bell(seen, 60 * kSecondNs));
  const auto request = owner->read_request();
  CHECK(request && request->limit_bytes == 77);
  owner->acknowledge({.revision = 1, .state = AckState::kShrinking});
  owner->acknowledge({.revision = 1, .state = AckState::kApplied});
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

TEST(control_block_reads_see_whole_publications) {
  const Memory memory;
  const auto owner = make(memory);
  const auto view = ControlBlockView::open(memory.span());
  REQUIRE(view);
  std::atomic<bool> stop{false};
  // Two writers: several threads of an owner may publish.
  const auto publish = [&] {
    for (std::uint64_t value = 1; !stop.load(); ++value) {
      owner->publish_usage(
          {.capacity_bytes = value, .mapped_bytes = value, .under_pressure = value});
    }
  };
  std::thread first(publish);
  std::thread second(publish);
  std::uint64_t changes = 0;
  std::uint64_t last = 0;
  for (int i = 0; i < 200'000 || changes < 2000; ++i) {
    Usage usage;
    if (!(*view).read_usage(usage)) continue;
    CHECK(usage.capacity_bytes == usage.mapped_bytes && usage.mapped_bytes == usage.under_pressure);
    changes += usage.under_pressure != last ? 1 : 0;
    last = usage.under_pressure;
  }
  stop = true;
  first.join();
  second.join();
}

/// A shared mapping of a file that others may shorten.
class File {
 public:
  File() : fd_(memfd_create("control_block", MFD_CLOEXEC)) {
    CHECK(ftruncate(fd_, kSegmentBytes) == 0);
    start_ = mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    munmap(start_, kSegmentBytes);
    close(fd_);
  }
  int fd() const { return fd_; }
  std::span<std::byte> span() const { return {static_cast<std::byte*>(start_), kSegmentBytes}; }

 private:
  int fd_;
  void* start_;
};

TEST(control_block_copies_see_whole_publications) {
  const File file;
  const auto owner = ControlBlockOwner::create(file.span(), somebody());
  REQUIRE(owner);
  std::atomic<bool> stop{false};
  std::thread publisher([&] {
    for (std::uint64_t value = 1; !stop.load(); ++value) {
      (*owner)->publish_usage(
          {.capacity_bytes = value, .mapped_bytes = value, .under_pressure = value});
      // Bursts, and time in between for three reads of the file.
      if (value % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  const Memory copy;
  std::uint64_t changes = 0;
  std::uint64_t last = 0;
  for (int i = 0; i < 2000 || changes < 200; ++i) {
    REQUIRE(copy_control_block(file.fd(), copy.span()) == 0);
    const auto view = ControlBlockView::open(copy.span());
    REQUIRE(view);
    Usage usage;
    CHECK((*view).read_usage(usage));
    CHECK(usage.capacity_bytes == usage.mapped_bytes && usage.mapped_bytes == usage.under_pressure);
    changes += usage.under_pressure != last ? 1 : 0;
    last = usage.under_pressure;
  }
  stop = true;
  publisher.join();
}

TEST(control_block_copy_of_a_truncated_file) {
  const File file;
  REQUIRE(ControlBlockOwner::create(file.span(), somebody()));
  const Memory copy;
  CHECK(ftruncate(file.fd(), 100) == 0);
  CHECK(copy_control_block(file.fd(), copy.span()) == 0);
  CHECK(control_block_version(copy.span()) == kControlBlockAbiVersion);
  CHECK(!ControlBlockView::open(copy.span()));
  CHECK(copy_control_block(-1, copy.span()) == EBADF);
}

TEST(control_block_owner_survives_a_request_storm) {
  const Memory memory;
  const auto owner = make(memory);
  auto writer = RequestWriter::open(memory.span());
  REQUIRE(writer);
  std::atomic<bool> stop{false};
  std::thread storm([&] {
    for (std::uint64_t value = 1; !stop.load(); ++value) {
      writer->write({.limit_bytes = value, .min_bytes = value});
    }
  });
  int read = 0;
  for (int i = 0; i < 20'000 || read == 0; ++i) {
    const auto request = owner->read_request();
    if (!request) continue;
    ++read;
    CHECK(request->limit_bytes == request->min_bytes && request->limit_bytes == request->revision);
  }
  stop = true;
  storm.join();
}

TEST(control_block_counters_lose_no_updates) {
  const Memory memory;
  const auto owner = make(memory);
  const auto add = [&] {
    for (int i = 0; i < 50'000; ++i) owner->add(Counter::kFrees, 2);
  };
  std::thread other(add);
  add();
  other.join();
  const auto view = ControlBlockView::open(memory.span());
  REQUIRE(view);
  CHECK((*view).counter(Counter::kFrees) == 200'000);
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(Counter::kCount); ++i) {
    CHECK(counter_name(static_cast<Counter>(i)) != "unknown");
  }
}

}  // namespace
}  // namespace kvelastic
