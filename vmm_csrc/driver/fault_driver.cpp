#include "driver/fault_driver.h"

#include <string>

namespace kvelastic {
namespace {

Error injected(Errc code, const char* call) {
  return {code, std::string(call) + " failed because a test asked for it"};
}

}  // namespace

void FaultDriver::arm(std::uint64_t fail_at, std::uint64_t fail_count) {
  calls_ = 0;
  first_ = fail_at;
  count_ = fail_count;
}

bool FaultDriver::fails() {
  const std::uint64_t call = calls_.fetch_add(1) + 1;
  const std::uint64_t first = first_.load();
  return first != 0 && call >= first && call - first < count_.load();
}

Result<Handle> FaultDriver::create(std::size_t bytes) {
  if (fails()) return injected(Errc::kOutOfMemory, "create");
  return inner_->create(bytes);
}

Status FaultDriver::destroy(Handle handle, std::size_t bytes) {
  if (fails()) return injected(Errc::kMapping, "destroy");
  return inner_->destroy(handle, bytes);
}

Status FaultDriver::map(std::byte* address, std::size_t bytes, Handle handle) {
  if (fails()) return injected(Errc::kMapping, "map");
  return inner_->map(address, bytes, handle);
}

Status FaultDriver::set_access(std::byte* address, std::size_t bytes) {
  if (fails()) return injected(Errc::kMapping, "set_access");
  return inner_->set_access(address, bytes);
}

Status FaultDriver::unmap(std::byte* address, std::size_t bytes) {
  if (fails()) return injected(Errc::kMapping, "unmap");
  return inner_->unmap(address, bytes);
}

Status FaultDriver::copy(std::span<const CopyRun> runs) {
  if (fails()) return injected(Errc::kMapping, "copy");
  return inner_->copy(runs);
}

Status FaultDriver::copy_host(std::span<const HostCopy> copies, CopyTo to) {
  if (fails()) return injected(Errc::kMapping, "copy_host");
  return inner_->copy_host(copies, to);
}

}  // namespace kvelastic
