#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>
#include <vector>

#include "settings.h"
#include "visible_devices.h"

namespace kvsim {
namespace {

constexpr std::size_t kMostAddresses = std::size_t{1} << 47;

std::size_t granule() {
  return Machine::instance().granularity_bytes();
}

bool is_aligned(std::uint64_t value) {
  return value % granule() == 0;
}

void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}

CUdeviceptr at_of(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

/// Addresses that hold nothing and fault; `at` 0 is anywhere.
void* map_nothing(CUdeviceptr at, std::size_t bytes, int extra_flags) {
  return ::mmap(pointer(at), bytes, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | extra_flags, -1, 0);
}

/// Aligned addresses, or 0.
CUdeviceptr take_addresses(std::size_t bytes, std::size_t alignment) {
  void* raw = map_nothing(0, bytes + alignment, 0);
  if (raw == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<CUdeviceptr>(raw);
  const CUdeviceptr aligned = (begin + alignment - 1) / alignment * alignment;
  const std::size_t head = aligned - begin;
  if (head > 0) ::munmap(raw, head);
  if (alignment > head) ::munmap(pointer(aligned + bytes), alignment - head);
  return aligned;
}

}  // namespace

Memory& memory() {
  static auto* const instance = new Memory;
  return *instance;
}

// --- ranges

CUresult Memory::reserve(CUdeviceptr* address, std::size_t bytes, std::size_t alignment,
                         CUdeviceptr hint, std::uint64_t flags) {
  if (address == nullptr || bytes == 0 || !is_aligned(bytes) || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (alignment != 0 && !std::has_single_bit(alignment)) return CUDA_ERROR_INVALID_VALUE;
  alignment = std::max(alignment, granule());
  if (bytes > kMostAddresses || alignment > kMostAddresses) return CUDA_ERROR_OUT_OF_MEMORY;
  CUdeviceptr at = 0;
  if (hint != 0 && hint % alignment == 0) {
    // A hint only: where something lies already, the address is the driver's choice.
    void* got = map_nothing(hint, bytes, MAP_FIXED_NOREPLACE);
    if (got == pointer(hint)) at = hint;
    if (got != MAP_FAILED && at == 0) ::munmap(got, bytes);
  }
  if (at == 0) at = take_addresses(bytes, alignment);
  if (at == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  CUdeviceptr shadow = 0;
  if (settings().unreadable) {
    shadow = take_addresses(bytes, granule());
    if (shadow == 0) {
      ::munmap(pointer(at), bytes);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  ranges_[at] = Range{bytes, bytes, nullptr, shadow};
  *address = at;
  return CUDA_SUCCESS;
}

CUresult Memory::free_range(CUdeviceptr address, std::size_t bytes) {
  const auto range = ranges_.find(address);
  if (range == ranges_.end() || range->second.bytes != bytes || range->second.plain != nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto inside = mappings_.lower_bound(address);
  if (inside != mappings_.end() && inside->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (::munmap(pointer(address), bytes) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
  if (range->second.shadow != 0) ::munmap(pointer(range->second.shadow), bytes);
  ranges_.erase(range);
  return CUDA_SUCCESS;
}

Memory::Ranges::const_iterator Memory::range_of(CUdeviceptr address, std::size_t bytes) const {
  auto range = ranges_.upper_bound(address);
  if (range == ranges_.begin()) return ranges_.end();
  --range;
  const CUdeviceptr offset = address - range->first;
  if (offset > range->second.bytes || bytes > range->second.bytes - offset) return ranges_.end();
  return range;
}

void* Memory::reach(CUdeviceptr address) const {
  const auto range = range_of(address, 1);
  if (range == ranges_.end() || range->second.shadow == 0) return pointer(address);
  return pointer(range->second.shadow + (address - range->first));
}

// --- allocations and their handles

CUresult Memory::create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                        const CUmemAllocationProp* prop, std::uint64_t flags) {
  if (handle == nullptr || prop == nullptr || flags != 0 || bytes == 0 || !is_aligned(bytes) ||
      prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->win32HandleMetaData != nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (prop->location.type == CU_MEM_LOCATION_TYPE_HOST ||
      prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA) {
    return CUDA_ERROR_NOT_SUPPORTED;  // a real driver has these; the simulated one only devices
  }
  if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(prop->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  const int types = prop->requestedHandleTypes;
  if (types != CU_MEM_HANDLE_TYPE_NONE && types != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const bool rdma = prop->allocFlags.gpuDirectRDMACapable != 0;
  if (rdma && !settings().rdma) return CUDA_ERROR_NOT_SUPPORTED;
  if (bytes > settings().oom_at_bytes || held_bytes_ > settings().oom_at_bytes - bytes) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  Head head = 0;
  const CUresult result =
      Machine::instance().create(physical_device(prop->location.id), bytes, rdma,
                                 types == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, &head);
  if (result != CUDA_SUCCESS) return result;
  *handle = adopt(head)->handle;
  return CUDA_SUCCESS;
}

/// The allocation of `head`, which this process holds, with one reference to its handle.
Memory::Allocation* Memory::adopt(Head head) {
  const Machine& machine = Machine::instance();
  auto made = std::make_unique<Allocation>(Allocation{
      next_handle_++, head, visible_device(machine.device(head)), machine.bytes(head), 1, 0});
  Allocation* allocation = made.get();
  by_handle_[allocation->handle] = std::move(made);
  by_head_[head] = allocation;
  held_bytes_ += allocation->bytes;
  return allocation;
}

Memory::Allocation* Memory::living(CUmemGenericAllocationHandle handle) {
  const auto found = by_handle_.find(handle);
  if (found == by_handle_.end() || found->second->references == 0) return nullptr;
  return found->second.get();
}

void Memory::settle(Allocation* allocation) {
  if (allocation->references > 0 || allocation->mappings > 0) return;
  Machine::instance().drop(allocation->head);
  held_bytes_ -= allocation->bytes;
  by_head_.erase(allocation->head);
  by_handle_.erase(allocation->handle);
}

CUresult Memory::release(CUmemGenericAllocationHandle handle) {
  Allocation* allocation = living(handle);
  if (allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;
  --allocation->references;
  settle(allocation);
  return CUDA_SUCCESS;
}

CUresult Memory::retain(CUmemGenericAllocationHandle* handle, CUdeviceptr address) {
  const auto mapping = mapping_at(address);
  if (handle == nullptr || mapping == mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
  if (range_of(address, 1)->second.plain != nullptr) return CUDA_ERROR_INVALID_VALUE;
  ++mapping->second.allocation->references;
  *handle = mapping->second.allocation->handle;
  return CUDA_SUCCESS;
}

CUresult Memory::properties(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
  const Allocation* allocation = living(handle);
  if (prop == nullptr || allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Machine& machine = Machine::instance();
  *prop = CUmemAllocationProp{};
  prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop->location = {CU_MEM_LOCATION_TYPE_DEVICE, allocation->device};
  if (machine.exportable(allocation->head)) {
    prop->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  }
  prop->allocFlags.gpuDirectRDMACapable = machine.rdma(allocation->head) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult Memory::export_fd(int* fd, CUmemGenericAllocationHandle handle) {
  const Allocation* allocation = living(handle);
  if (fd == nullptr || allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Machine::instance().exportable(allocation->head)) return CUDA_ERROR_INVALID_VALUE;
  return Machine::instance().export_fd(allocation->head, fd);
}

CUresult Memory::import_fd(CUmemGenericAllocationHandle* handle, int fd) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Head head = 0;
  const CUresult result = Machine::instance().import_fd(fd, &head);
  if (result != CUDA_SUCCESS) return result;
  const auto known = by_head_.find(head);
  if (known == by_head_.end()) {
    *handle = adopt(head)->handle;
  } else {
    ++known->second->references;
    *handle = known->second->handle;
  }
  return CUDA_SUCCESS;
}

std::size_t Memory::live_handles() const {
  std::size_t handles = 0;
  for (const auto& [handle, allocation] : by_handle_) handles += allocation->references > 0 ? 1 : 0;
  return handles;
}

// --- mappings

CUresult Memory::map(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                     CUmemGenericAllocationHandle handle, std::uint64_t flags, Work* work) {
  Allocation* allocation = living(handle);
  if (allocation == nullptr || flags != 0 || offset != 0 || !is_aligned(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (bytes != allocation->bytes) return CUDA_ERROR_INVALID_VALUE;  // a handle is mapped whole
  const auto range = range_of(address, bytes);
  if (range == ranges_.end() || range->second.plain != nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto next = mappings_.lower_bound(address);
  if (next != mappings_.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (mapping_at(address) != mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
  mappings_[address] = Mapping{bytes, allocation, CU_MEM_ACCESS_FLAGS_PROT_NONE};
  ++allocation->mappings;
  work->granules = bytes / granule();
  return CUDA_SUCCESS;
}

Memory::Mappings::const_iterator Memory::mapping_at(CUdeviceptr address) const {
  auto mapping = mappings_.upper_bound(address);
  if (mapping == mappings_.begin()) return mappings_.end();
  --mapping;
  return address - mapping->first < mapping->second.bytes ? mapping : mappings_.end();
}

/// Whether [address, +bytes) is exactly a run of whole mappings in one range: `first` up to `last`.
bool Memory::whole_mappings(CUdeviceptr address, std::size_t bytes, Mappings::iterator* first,
                            Mappings::iterator* last, Work* work) {
  const auto range = range_of(address, bytes);
  if (bytes == 0 || range == ranges_.end() || range->second.plain != nullptr) return false;
  *first = mappings_.find(address);
  *last = *first;
  work->handles = 0;
  work->granules = bytes / granule();
  CUdeviceptr at = address;
  while (at < address + bytes) {
    if (*last == mappings_.end() || (*last)->first != at) return false;
    at += (*last)->second.bytes;
    ++*last;
    ++work->handles;
  }
  return at == address + bytes;
}

CUresult Memory::unmap(CUdeviceptr address, std::size_t bytes, Work* work) {
  Mappings::iterator first, last;
  if (!whole_mappings(address, bytes, &first, &last, work)) return CUDA_ERROR_INVALID_VALUE;
  if (map_nothing(at_of(reach(address)), bytes, MAP_FIXED) == MAP_FAILED) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  for (auto mapping = first; mapping != last; ++mapping) {
    Allocation* allocation = mapping->second.allocation;
    if (mapping->second.access != CU_MEM_ACCESS_FLAGS_PROT_NONE) --accessible_mappings_;
    --allocation->mappings;
    settle(allocation);
  }
  mappings_.erase(first, last);
  return CUDA_SUCCESS;
}

/// Gives one mapping its access, which is when the memory appears at its addresses.
CUresult Memory::change_access(Mappings::iterator mapping, CUmemAccess_flags access) {
  const CUdeviceptr begin = at_of(reach(mapping->first));
  CUdeviceptr at = begin;
  Mapping& found = mapping->second;
  if (found.access == access) return CUDA_SUCCESS;
  if (access == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
    if (map_nothing(at, found.bytes, MAP_FIXED) == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    --accessible_mappings_;
    found.access = access;
    return CUDA_SUCCESS;
  }
  const bool was_accessible = found.access != CU_MEM_ACCESS_FLAGS_PROT_NONE;
  if (!was_accessible && accessible_mappings_ >= settings().max_mappings) {
    return CUDA_ERROR_OUT_OF_MEMORY;  // as real drivers do beyond some 520,000, inside this call
  }
  const Machine& machine = Machine::instance();
  const int protection =
      access == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_READ | PROT_WRITE;
  for (const Extent& extent : machine.extents(found.allocation->head)) {
    if (::mmap(pointer(at), extent.bytes, protection, MAP_SHARED | MAP_FIXED, machine.fd(),
               static_cast<off_t>(extent.offset)) == MAP_FAILED) {
      map_nothing(begin, found.bytes, MAP_FIXED);  // vm.max_map_count, most likely
      if (was_accessible) --accessible_mappings_;
      found.access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    at += extent.bytes;
  }
  if (!was_accessible) ++accessible_mappings_;
  found.access = access;
  return CUDA_SUCCESS;
}

CUresult Memory::set_access(CUdeviceptr address, std::size_t bytes,
                            const CUmemAccessDesc* descriptions, std::size_t count, Work* work) {
  Mappings::iterator first, last;
  if (descriptions == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  if (!whole_mappings(address, bytes, &first, &last, work)) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < count; ++i) {
    const CUmemLocation& location = descriptions[i].location;
    const int flags = descriptions[i].flags;
    if (location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
         flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    for (auto mapping = first; mapping != last; ++mapping) {
      if (location.id != mapping->second.allocation->device) return CUDA_ERROR_INVALID_DEVICE;
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<std::pair<Mappings::iterator, CUmemAccess_flags>> changed;
    for (auto mapping = first; mapping != last; ++mapping) {
      const CUmemAccess_flags before = mapping->second.access;
      const CUresult result = change_access(mapping, descriptions[i].flags);
      if (result != CUDA_SUCCESS) {
        for (const auto& [done, access] : changed) (void)change_access(done, access);
        return result;
      }
      changed.emplace_back(mapping, before);
    }
  }
  return CUDA_SUCCESS;
}

CUresult Memory::get_access(unsigned long long* flags, const CUmemLocation* location,
                            CUdeviceptr address) {
  if (flags == nullptr || location == nullptr || location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!is_device(location->id)) return CUDA_ERROR_INVALID_DEVICE;
  const auto mapping = mapping_at(address);
  if (mapping == mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
  const bool own = mapping->second.allocation->device == location->id;
  *flags = own ? mapping->second.access : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

}  // namespace kvsim
