#include "api.h"

#include <charconv>

namespace kvsim {
namespace {

struct Name {
  std::string_view exported;
  std::string_view base;
};

constexpr Name kNames[] = {
#define KVSIM_FUNCTION(exported, base, version) {#exported, #base},
#include "functions.inc"
#undef KVSIM_FUNCTION
};

}  // namespace

const char* name_of(Function function) {
  return kNames[static_cast<std::size_t>(function)].exported.data();
}

std::optional<Function> function_named(std::string_view name) {
  for (std::size_t i = kFunctions; i-- > 0;) {
    if (kNames[i].exported == name) return static_cast<Function>(i);
  }
  // Newer forms stand behind older ones in functions.inc: backwards meets the newest first.
  for (std::size_t i = kFunctions; i-- > 0;) {
    if (kNames[i].base == name) return static_cast<Function>(i);
  }
  return std::nullopt;
}

const char* name_of(CUresult result) {
  switch (result) {
#define KVSIM_RESULT(name, number) \
  case name:                       \
    return #name;
#include "results.inc"
#undef KVSIM_RESULT
  }
  return nullptr;
}

std::optional<CUresult> result_named(std::string_view text) {
#define KVSIM_RESULT(name, number) \
  if (text == #name) return name;
#include "results.inc"
#undef KVSIM_RESULT
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  const auto result = static_cast<CUresult>(number);
  return name_of(result) != nullptr ? std::optional(result) : std::nullopt;
}

}  // namespace kvsim
