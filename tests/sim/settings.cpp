#include "settings.h"

#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <limits>

namespace kvsim {
namespace {

std::string text(const char* name, const char* otherwise = "") {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' ? value : otherwise;
}

std::size_t bytes(const char* name, std::size_t otherwise) {
  const std::string value = text(name);
  std::size_t parsed = 0;
  if (value.empty()) return otherwise;
  if (parse_bytes(value, &parsed)) return parsed;
  complain(std::string(name) + "=" + value + " is not a size; using the default");
  return otherwise;
}

int number(const char* name, int otherwise) {
  const std::string value = text(name);
  if (value.empty()) return otherwise;
  char* end = nullptr;
  const long parsed = std::strtol(value.c_str(), &end, 10);
  if (*end == '\0' && parsed >= 0 && parsed <= std::numeric_limits<int>::max()) {
    return static_cast<int>(parsed);
  }
  complain(std::string(name) + "=" + value + " is not a number; using the default");
  return otherwise;
}

bool flag(const char* name, bool otherwise) {
  const std::string value = text(name, otherwise ? "1" : "0");
  return value != "0" && value != "false" && value != "no";
}

Settings read() {
  Settings s;
  s.machine = text("KVSIM_MACHINE");
  s.memory_bytes = bytes("KVSIM_MEMORY", std::size_t{1} << 30);
  s.granularity_bytes = bytes("KVSIM_GRANULARITY", std::size_t{2} << 20);
  s.devices = number("KVSIM_DEVICES", 1);
  s.mig = number("KVSIM_MIG", 0);
  s.driver_version = number("KVSIM_DRIVER_VERSION", 13000);
  s.compute_capability = number("KVSIM_COMPUTE_CAPABILITY", 90);
  s.no_vmm = flag("KVSIM_NO_VMM", false);
  s.no_device = flag("KVSIM_NO_DEVICE", false) || s.devices == 0;
  s.rdma = flag("KVSIM_RDMA", true);
  s.poison = flag("KVSIM_POISON", false);
  s.unreadable = flag("KVSIM_UNREADABLE", false);
  s.strict_context = flag("KVSIM_STRICT_CONTEXT", false);
  s.context_bytes = bytes("KVSIM_CONTEXT_BYTES", 0);
  s.growth_bytes = bytes("KVSIM_CONTEXT_GROWTH", 0);
  s.max_mappings = bytes("KVSIM_MAX_MAPPINGS", 520000);
  s.oom_at_bytes = bytes("KVSIM_OOM_AT_BYTES", std::numeric_limits<std::size_t>::max());
  s.oom_at_create = text("KVSIM_OOM_AT_CREATE");
  s.not_ready = text("KVSIM_NOT_READY");
  s.fail = text("KVSIM_FAIL");
  s.delay = text("KVSIM_DELAY");
  s.profile = text("KVSIM_PROFILE");
  s.trace = text("KVSIM_TRACE");
  s.hold = text("KVSIM_HOLD");
  s.queue = bytes("KVSIM_QUEUE", 1024);
  s.lag = static_cast<std::uint64_t>(number("KVSIM_LAG", 0));
  s.linger = text("KVSIM_LINGER");
  constexpr std::size_t kSystemPageBytes = 4096;
  if (s.granularity_bytes % kSystemPageBytes != 0 || s.granularity_bytes == 0) {
    complain("KVSIM_GRANULARITY must be a positive multiple of 4096; using 2M");
    s.granularity_bytes = std::size_t{2} << 20;
  }
  return s;
}

}  // namespace

const Settings& settings() {
  static const Settings* const instance = new Settings(read());  // never destroyed: see call.h
  return *instance;
}

bool parse_bytes(const std::string& value, std::size_t* bytes) {
  if (value.empty() || std::isdigit(static_cast<unsigned char>(value[0])) == 0) return false;
  char* end = nullptr;
  const unsigned long long count = std::strtoull(value.c_str(), &end, 10);
  unsigned shift = 0;
  switch (std::toupper(static_cast<unsigned char>(*end))) {
    case 'K':
      shift = 10;
      break;
    case 'M':
      shift = 20;
      break;
    case 'G':
      shift = 30;
      break;
    case 'T':
      shift = 40;
      break;
    default:
      break;
  }
  if (shift != 0) ++end;
  if (*end != '\0' || (count << shift) >> shift != count) return false;
  *bytes = static_cast<std::size_t>(count << shift);
  return true;
}

void complain(const std::string& message) {
  const std::string line = "kvsim: " + message + "\n";
  (void)!::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace kvsim
