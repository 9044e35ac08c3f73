// cuMemAlloc's memory, and questions about addresses of any kind.
#include <utility>
#include <vector>

#include "memory.h"
#include "visible_devices.h"

namespace kvsim {

CUresult Memory::alloc(CUdeviceptr* address, std::size_t bytes, Context* context) {
  if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t granule_bytes = Machine::instance().granularity_bytes();
  if (bytes > Machine::instance().device_bytes()) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::size_t whole = (bytes + granule_bytes - 1) / granule_bytes * granule_bytes;
  Head head = 0;
  CUresult result =
      Machine::instance().create(physical_device(context->device), whole, false, false, &head);
  if (result != CUDA_SUCCESS) return result;
  Allocation* allocation = adopt(head);
  CUdeviceptr at = 0;
  result = reserve(&at, whole, 0, 0, 0);
  if (result == CUDA_SUCCESS) {
    Work work;
    const CUmemAccessDesc both{{CU_MEM_LOCATION_TYPE_DEVICE, context->device},
                               CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    result = map(at, whole, 0, allocation->handle, 0, &work);
    if (result == CUDA_SUCCESS) result = set_access(at, whole, &both, 1, &work);
    if (result != CUDA_SUCCESS) {
      (void)unmap(at, whole, &work);
      (void)free_range(at, whole);
    }
  }
  --allocation->references;  // the mapping holds it, or nothing does
  settle(allocation);
  if (result != CUDA_SUCCESS) return result;
  ranges_[at].plain = context;
  ranges_[at].asked_bytes = bytes;
  *address = at;
  return CUDA_SUCCESS;
}

CUresult Memory::free(CUdeviceptr address) {
  if (address == 0) return CUDA_SUCCESS;
  const auto range = ranges_.find(address);
  if (range == ranges_.end() || range->second.plain == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t bytes = range->second.bytes;
  Context* context = std::exchange(range->second.plain, nullptr);
  Work work;
  CUresult result = unmap(address, bytes, &work);
  if (result == CUDA_SUCCESS) result = free_range(address, bytes);
  if (result != CUDA_SUCCESS) range->second.plain = context;
  return result;
}

void Memory::free_all_of(const Context* context) {
  std::vector<CUdeviceptr> plain;
  for (const auto& [address, range] : ranges_) {
    if (range.plain == context) plain.push_back(address);
  }
  for (const CUdeviceptr address : plain) (void)free(address);
}

bool Memory::find(CUdeviceptr address, Place* place) const {
  const auto range = range_of(address, 1);
  if (range == ranges_.end()) return false;
  *place = Place{};
  place->range_base = range->first;
  place->range_bytes = range->second.asked_bytes;
  place->context = range->second.plain;
  const auto mapping = mapping_at(address);
  if (mapping == mappings_.end()) return true;
  const Allocation& allocation = *mapping->second.allocation;
  place->mapped = true;
  place->mapping_base = mapping->first;
  place->mapping_bytes = mapping->second.bytes;
  place->handle = allocation.handle;
  place->device = allocation.device;
  place->rdma = Machine::instance().rdma(allocation.head);
  place->exportable = Machine::instance().exportable(allocation.head);
  place->access = mapping->second.access;
  return true;
}

bool Memory::accessible(CUdeviceptr address, std::size_t bytes, bool write) const {
  const int needed = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
  CUdeviceptr at = address;
  while (at < address + bytes) {
    const auto mapping = mapping_at(at);
    if (mapping == mappings_.end() || (mapping->second.access & needed) != needed) return false;
    at = mapping->first + mapping->second.bytes;
  }
  return true;
}

bool Memory::touches_range(CUdeviceptr address, std::size_t bytes) const {
  if (range_of(address, 1) != ranges_.end()) return true;
  const auto next = ranges_.lower_bound(address);
  return next != ranges_.end() && next->first < address + bytes;
}

}  // namespace kvsim
