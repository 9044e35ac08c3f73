// The simulated machine: the memory of its devices, shared by every process that names it.
//
// One file (KVSIM_MACHINE, or a memfd of this process alone):
//
//   [ header: mutex, processes, counters ][ one record a granule ][ device 0 | device 1 | ... ]
//
// An allocation is a chain of granules, named by its first one (the "head"). The head says which
// processes hold it, one bit each; when the last lets go, the granules are free and zero again.
// A process that died is found by its pid and start time, and lets go of everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda_abi.h"

namespace kvsim {

using Head = std::uint32_t;

/// A run of adjacent granules in the file.
struct Extent {
  std::uint64_t offset;
  std::size_t bytes;
};

struct Header;
struct Granule;

/// Thread-safe. Every function may wait a moment for other processes, none waits for long.
class Machine {
 public:
  static constexpr int kMaxProcesses = 64;
  static constexpr int kMaxDevices = 16;

  /// The machine of the environment, made where it does not exist yet. cuInit() calls this once.
  static CUresult open();
  static Machine& instance();
  ~Machine();

  int devices() const { return devices_; }
  std::size_t device_bytes() const { return device_bytes_; }
  std::size_t granularity_bytes() const { return granule_bytes_; }
  int fd() const { return fd_; }

  /// Takes `bytes` (a multiple of the granularity) of zeroed memory and holds it.
  CUresult create(int device, std::size_t bytes, bool rdma, bool exportable, Head* head);
  /// Lets go for this process.
  void drop(Head head);

  std::vector<Extent> extents(Head head) const;
  std::size_t bytes(Head head) const;
  int device(Head head) const;
  bool rdma(Head head) const;
  bool exportable(Head head) const;

  /// A descriptor that holds the allocation for as long as a copy of it is open anywhere.
  CUresult export_fd(Head head, int* fd);
  /// Holds the allocation of an exported descriptor. CUDA_ERROR_INVALID_VALUE when it is none of
  /// this machine.
  CUresult import_fd(int fd, Head* head);

  /// What all processes together hold, those that died not counted; and what one holds.
  std::size_t used_bytes(int device);
  std::size_t process_bytes(int device, int pid);

  /// Lets go of everything for this process, as its end does.
  void drop_all();

 private:
  Machine() = default;
  CUresult open_file();
  CUresult initialise();
  CUresult attach();

  bool lock();
  void unlock();
  void repair();
  void reap(std::uint64_t dead = 0);
  void free_chain(Head head);
  void punch(std::uint32_t granule);
  bool exported_alive(Head head) const;
  bool poison(Head head);

  int fd_ = -1;
  int devices_ = 0;
  std::size_t device_bytes_ = 0;
  std::size_t granule_bytes_ = 0;
  std::uint32_t granules_each_ = 0;
  std::uint64_t data_offset_ = 0;
  int slot_ = -1;
  Header* header_ = nullptr;
  Granule* granules_ = nullptr;
};

}  // namespace kvsim
