// The list of driver functions as numbers, and how one is exported.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "cuda_abi.h"

#define KVSIM_API extern "C" __attribute__((visibility("default")))

namespace kvsim {

/// A driver function by its exported name: Function::cuMemMap.
enum class Function : unsigned {
#define KVSIM_FUNCTION(exported, base, version) exported,
#include "functions.inc"
#undef KVSIM_FUNCTION
  kCount
};
inline constexpr std::size_t kFunctions = static_cast<std::size_t>(Function::kCount);

/// Names of errors, addresses of functions, the version: questions that no fault plan counts and
/// "*" does not mean.
constexpr bool is_question(Function function) {
  return function <= Function::cuDriverGetVersion;
}

/// The exported name, as the trace writes it.
const char* name_of(Function function);

/// The function that a person means: by exported name, or by the base name of its newest form.
std::optional<Function> function_named(std::string_view name);

/// "CUDA_ERROR_UNKNOWN", or null for a number that is no CUresult.
const char* name_of(CUresult result);

/// A CUresult by name or by number.
std::optional<CUresult> result_named(std::string_view text);

}  // namespace kvsim
