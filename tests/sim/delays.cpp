#include "delays.h"

#include <time.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "settings.h"

namespace kvsim {
namespace {

// Microseconds a handle, from shared/reference/cuda-vmm.md section 1.1 unless a comment says other.
struct Profile {
  std::string_view name;
  std::string_view delays;
};

constexpr Profile kProfiles[] = {
    // kvcached's bench_vmm; release is ConServe's figure for the same GPU, cuMemGetInfo kvcached's.
    {"a100",
     "cuMemAddressReserve=19,cuMemCreate=193,cuMemMap=1.45,cuMemSetAccess=36,cuMemUnmap=25.6,"
     "cuMemRelease=24,cuMemGetInfo=6"},
    // forkedkv; it gives no create, map and release, which are ConServe's (A100).
    {"h100",
     "cuMemAddressReserve=3,cuMemAddressFree=3,cuMemCreate=29.2,cuMemMap=1.9,cuMemSetAccess=50,"
     "cuMemUnmap=30,cuMemRelease=24,cuMemGetInfo=6"},
    // The middle of the ranges; set_access in its two parts, 22 us a handle and 12 us every 2 MiB.
    // No figure for reserve: h100's.
    {"gb10",
     "cuMemAddressReserve=3,cuMemCreate=66,cuMemMap=0.7,cuMemSetAccess=22+12,cuMemUnmap=48,"
     "cuMemRelease=32,cuMemGetInfo=6"},
};

// A sleep overshoots by the timer slack (50 us) and more, so the last part of a wait is spent
// spinning, and a short wait altogether: a delay is to be what it says.
constexpr std::uint64_t kSpin_ns = 100'000;
constexpr std::uint64_t kShortestSleep_ns = 50'000;

void wait_until(std::uint64_t end_ns) {
  const std::uint64_t now = now_ns();
  if (end_ns > now + kSpin_ns + kShortestSleep_ns) {
    const std::uint64_t sleep_ns = end_ns - now - kSpin_ns;
    constexpr std::uint64_t kSecond_ns = 1'000'000'000;
    const timespec sleep{static_cast<time_t>(sleep_ns / kSecond_ns),
                         static_cast<long>(sleep_ns % kSecond_ns)};
    ::nanosleep(&sleep, nullptr);
  }
  while (now_ns() < end_ns) {
  }
}

std::string_view profile_named(const std::string& name) {
  for (const Profile& profile : kProfiles) {
    if (profile.name == name) return profile.delays;
  }
  if (!name.empty()) complain("KVSIM_PROFILE=" + name + " is none of a100, h100, gb10; no delays");
  return {};
}

}  // namespace

const Delays& Delays::instance() {
  static const Delays* const delays = [] {
    auto* made = new Delays;
    (void)made->add(profile_named(settings().profile));
    if (!made->add(settings().delay))
      complain("KVSIM_DELAY=" + settings().delay + " does not parse");
    return made;
  }();
  return *delays;
}

bool Delays::add(std::string_view text) {
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    const std::size_t equals = part.find('=');
    if (equals == std::string_view::npos) return false;
    const std::optional<Function> function = function_named(part.substr(0, equals));
    const std::string value(part.substr(equals + 1));
    Price price;
    char* end = nullptr;
    price.handle_us = std::strtod(value.c_str(), &end);
    if (*end == '+') price.granule_us = std::strtod(end + 1, &end);
    if (!function || *end != '\0' || end == value.c_str()) return false;
    prices_[static_cast<std::size_t>(*function)] = price;
  }
  return true;
}

std::uint64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void Delays::spend(Function function, const Work& work, std::uint64_t began_ns) const {
  const Price& price = prices_[static_cast<std::size_t>(function)];
  const double us = price.handle_us * static_cast<double>(work.handles) +
                    price.granule_us * static_cast<double>(work.granules);
  if (us > 0) wait_until(began_ns + static_cast<std::uint64_t>(us * 1000));
}

}  // namespace kvsim
