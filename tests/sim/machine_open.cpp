// Finding or making a machine's file. Two processes may do it at once: a lock on the file, which
// the kernel takes back from a process that dies, lets one of them write it.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "machine.h"
#include "machine_file.h"
#include "settings.h"

namespace kvsim {
namespace {

Machine* the_machine = nullptr;

std::uint64_t round_up(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}

CUresult cannot(const std::string& what) {
  complain(what + ": " + std::strerror(errno));
  return CUDA_ERROR_SYSTEM_NOT_READY;
}

}  // namespace

Machine::~Machine() {
  if (header_ != nullptr) ::munmap(header_, data_offset_);
  if (fd_ >= 0) ::close(fd_);
}

Machine& Machine::instance() {
  return *the_machine;
}

CUresult Machine::open() {
  if (the_machine != nullptr) return CUDA_SUCCESS;
  std::unique_ptr<Machine> machine(new Machine);
  if (const CUresult result = machine->open_file(); result != CUDA_SUCCESS) return result;
  if (const CUresult result = machine->attach(); result != CUDA_SUCCESS) return result;
  the_machine = machine.release();  // lives as long as the process: calls may come very late
  return CUDA_SUCCESS;
}

CUresult Machine::open_file() {
  const std::string& path = settings().machine;
  fd_ = path.empty() ? ::memfd_create("kvsim", MFD_CLOEXEC)
                     : ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd_ < 0) return cannot("opening the machine " + path);
  if (::flock(fd_, LOCK_EX) != 0) return cannot("locking the machine " + path);
  const CUresult result = initialise();
  ::flock(fd_, LOCK_UN);
  return result;
}

CUresult Machine::initialise() {
  struct stat found{};
  if (::fstat(fd_, &found) != 0) return cannot("looking at the machine");
  std::uint64_t magic = 0;
  const bool has_magic =
      ::pread(fd_, &magic, sizeof magic, 0) == static_cast<ssize_t>(sizeof magic);
  if (has_magic && magic != kMagic && magic != 0) {
    complain(settings().machine + " is no simulated machine; it stays as it is");
    return CUDA_ERROR_SYSTEM_NOT_READY;
  }
  if (has_magic && magic == kMagic) {
    Header header_there;
    if (::pread(fd_, static_cast<void*>(&header_there), sizeof header_there, 0) !=
        static_cast<ssize_t>(sizeof header_there)) {
      return cannot("reading the machine");
    }
    devices_ = static_cast<int>(header_there.devices);
    granule_bytes_ = header_there.granule_bytes;
    granules_each_ = header_there.granules_each;
    data_offset_ = header_there.data_offset;
  } else {
    const Settings& s = settings();
    devices_ = std::min(s.devices, kMaxDevices);
    granule_bytes_ = s.granularity_bytes;
    granules_each_ = static_cast<std::uint32_t>(std::max<std::size_t>(
        1, std::min<std::size_t>(s.memory_bytes / granule_bytes_, (1U << 24) / devices_)));
    data_offset_ = round_up(sizeof(Header) + sizeof(Granule) * granules_each_ * devices_,
                            std::max<std::uint64_t>(granule_bytes_, 4096));
  }
  device_bytes_ = granules_each_ * granule_bytes_;
  const std::uint64_t file_bytes = data_offset_ + device_bytes_ * devices_;
  if (::ftruncate(fd_, static_cast<off_t>(file_bytes)) != 0) return cannot("sizing the machine");
  void* at = ::mmap(nullptr, data_offset_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (at == MAP_FAILED) return cannot("mapping the machine");
  header_ = static_cast<Header*>(at);
  granules_ = reinterpret_cast<Granule*>(static_cast<char*>(at) + sizeof(Header));
  if (has_magic && magic == kMagic) return CUDA_SUCCESS;

  // Half-written by a process that died: all of it is written again.
  std::memset(at, 0, data_offset_);
  new (header_) Header{};
  header_->devices = static_cast<std::uint32_t>(devices_);
  header_->granules_each = granules_each_;
  header_->granule_bytes = granule_bytes_;
  header_->data_offset = data_offset_;
  pthread_mutexattr_t attributes;
  ::pthread_mutexattr_init(&attributes);
  ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(&header_->mutex, &attributes);
  ::pthread_mutexattr_destroy(&attributes);
  std::atomic_ref(header_->magic).store(kMagic, std::memory_order_release);
  return CUDA_SUCCESS;
}

}  // namespace kvsim
