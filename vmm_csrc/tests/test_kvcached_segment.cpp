// kvcached's segment while other threads publish usage.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>

#include "base/descriptor.h"
#include "check.h"
#include "segment/kvcached_segment.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kCapacityBytes = std::uint64_t{1} << 30;

/// An instance's own segment in /dev/shm.
class OwnSegment {
 public:
  OwnSegment()
      : path_("/dev/shm/kvelastic_test_" + std::to_string(::getpid())),
        fd_(::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) {
    CHECK(::ftruncate(fd_.get(), kSegmentBytes) == 0);
    start_ = ::mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    CHECK(start_ != MAP_FAILED);
    ControlBlockIdentity identity;
    identity.name = "test";
    identity.engine = "test";
    identity.devices = {{"host", 1}};
    auto owner =
        ControlBlockOwner::create({static_cast<std::byte*>(start_), kSegmentBytes}, identity);
    CHECK(owner);
    control_block = *std::move(owner);
  }
  ~OwnSegment() {
    control_block.reset();
    ::munmap(start_, kSegmentBytes);
    ::unlink(path_.c_str());
  }
  OwnSegment(const OwnSegment&) = delete;
  OwnSegment& operator=(const OwnSegment&) = delete;

  const std::string& path() const { return path_; }

  std::shared_ptr<ControlBlockOwner> control_block;

 private:
  const std::string path_;
  const Descriptor fd_;
  void* start_ = nullptr;
};

Usage usage_of(std::uint64_t limit_bytes, std::uint64_t mapped_bytes) {
  Usage usage;
  usage.capacity_bytes = kCapacityBytes;
  usage.limit_bytes = limit_bytes;
  usage.mapped_bytes = mapped_bytes;
  usage.parked_bytes = mapped_bytes / 3;
  return usage;
}

TEST(kvcached_file_shows_last_usage_after_concurrent_looks) {
  const OwnSegment own;
  own.control_block->publish_usage(usage_of(64, 0));
  const std::string path = own.path() + "_kvcached";
  auto made = KvcachedSegment::create(path, own.path(), own.control_block);
  REQUIRE(made);
  KvcachedSegment& segment = **made;
  const Descriptor client(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  REQUIRE(client.is_open());
  constexpr std::uint64_t last = 20'000;
  std::atomic<bool> done{false};
  std::thread publisher([&] {
    for (std::uint64_t mapped = 1; mapped <= last; ++mapped) {
      own.control_block->publish_usage(usage_of(64, mapped));
    }
    done = true;
  });
  for (std::int64_t limit = 100; !done; ++limit) {
    CHECK(::pwrite(client.get(), &limit, sizeof(limit), 0) == sizeof(limit));
    CHECK(segment.look());  // a request, and the usage is published anew
  }
  publisher.join();
  std::array<std::int64_t, 3> values{};
  REQUIRE(::pread(client.get(), values.data(), sizeof(values), 0) == sizeof(values));
  CHECK(values[1] == last - last / 3);
  CHECK(values[2] == last / 3);
  segment.close();
  CHECK(::access(path.c_str(), F_OK) != 0);
}

}  // namespace
}  // namespace kvelastic
