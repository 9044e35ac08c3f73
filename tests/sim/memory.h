// Ranges, handles and mappings of this process, and the rules between them.
//
//   range       reserved addresses, PROT_NONE: a touch faults
//   allocation  memory of the machine, named by a handle; freed when released AND unmapped
//   mapping     a whole allocation at an address; PROT_NONE until set_access
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>

#include "context.h"
#include "cuda_abi.h"
#include "delays.h"
#include "machine.h"

namespace kvsim {

/// The longest distance between rows of a copy that any GPU so far takes.
inline constexpr std::size_t kMaxPitchBytes = 0x7fffffff;

/// What an address belongs to, for the pointer attributes.
struct Place {
  CUdeviceptr range_base;
  std::size_t range_bytes;
  bool mapped;
  CUdeviceptr mapping_base;
  std::size_t mapping_bytes;
  std::uint64_t handle;
  int device;
  bool rdma;
  bool exportable;
  CUmemAccess_flags access;
  Context* context;  ///< of plain memory
};

/// Not thread-safe: callers hold driver_mutex(). A call that fails has changed nothing.
class Memory {
 public:
  CUresult reserve(CUdeviceptr* address, std::size_t bytes, std::size_t alignment, CUdeviceptr hint,
                   std::uint64_t flags);
  CUresult free_range(CUdeviceptr address, std::size_t bytes);

  CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                  const CUmemAllocationProp* prop, std::uint64_t flags);
  CUresult release(CUmemGenericAllocationHandle handle);
  CUresult retain(CUmemGenericAllocationHandle* handle, CUdeviceptr address);
  CUresult properties(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle);
  CUresult export_fd(int* fd, CUmemGenericAllocationHandle handle);
  CUresult import_fd(CUmemGenericAllocationHandle* handle, int fd);

  CUresult map(CUdeviceptr address, std::size_t bytes, std::size_t offset,
               CUmemGenericAllocationHandle handle, std::uint64_t flags, Work* work);
  CUresult unmap(CUdeviceptr address, std::size_t bytes, Work* work);
  CUresult set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* descriptions,
                      std::size_t count, Work* work);
  CUresult get_access(unsigned long long* flags, const CUmemLocation* location,
                      CUdeviceptr address);

  /// Plain memory: a range of its own, with everything in it done at once.
  CUresult alloc(CUdeviceptr* address, std::size_t bytes, Context* context);
  CUresult free(CUdeviceptr address);
  void free_all_of(const Context* context);

  /// False when the address lies in no range.
  bool find(CUdeviceptr address, Place* place) const;
  /// True when every byte lies in mappings that may be read, or written.
  bool accessible(CUdeviceptr address, std::size_t bytes, bool write) const;
  /// True when any byte lies in a range of this process.
  bool touches_range(CUdeviceptr address, std::size_t bytes) const;
  /// Where the simulation itself reads and writes what lies at an address: there, unless the
  /// processor cannot read device memory (KVSIM_UNREADABLE). Contiguous within a range.
  void* reach(CUdeviceptr address) const;

  std::size_t live_ranges() const { return ranges_.size(); }
  std::size_t live_mappings() const { return mappings_.size(); }
  std::size_t live_allocations() const { return by_handle_.size(); }
  std::size_t live_handles() const;

 private:
  struct Allocation {
    std::uint64_t handle;
    Head head;
    int device;
    std::size_t bytes;
    std::uint64_t references;  // of the handle
    std::uint64_t mappings;
  };
  struct Mapping {
    std::size_t bytes;
    Allocation* allocation;
    CUmemAccess_flags access;
  };
  struct Range {
    std::size_t bytes;
    std::size_t asked_bytes;
    Context* plain;      // the context of plain memory; null: reserved by the caller
    CUdeviceptr shadow;  // where its memory is mapped instead, with KVSIM_UNREADABLE; else 0
  };
  using Ranges = std::map<CUdeviceptr, Range>;
  using Mappings = std::map<CUdeviceptr, Mapping>;

  Allocation* living(CUmemGenericAllocationHandle handle);
  Allocation* adopt(Head head);
  void settle(Allocation* allocation);  // forgets it when nothing refers to it
  Ranges::const_iterator range_of(CUdeviceptr address, std::size_t bytes) const;
  Mappings::const_iterator mapping_at(CUdeviceptr address) const;
  bool whole_mappings(CUdeviceptr address, std::size_t bytes, Mappings::iterator* first,
                      Mappings::iterator* last, Work* work);
  CUresult change_access(Mappings::iterator mapping, CUmemAccess_flags access);

  Ranges ranges_;
  Mappings mappings_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Allocation>> by_handle_;
  std::unordered_map<Head, Allocation*> by_head_;
  std::uint64_t next_handle_ = 0x10000;  // handles are not used again: a stale one is found out
  std::size_t held_bytes_ = 0;
  std::size_t accessible_mappings_ = 0;
};

Memory& memory();

}  // namespace kvsim
