// Results of native functions. Native code does not throw; the binding converts a failed result
// into the exception of kvelastic/errors.py with the same code.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvelastic {

/// The stable codes of kvelastic/errors.py that native code returns.
enum class Errc : std::uint8_t {
  kInvalidArgument,    ///< a value that is never accepted; the message names it
  kOutOfMemory,        ///< the device (or the machine) has no memory for another page
  kMapping,            ///< the driver refused a map, an unmap or a reservation
  kPoolFailed,         ///< a rollback failed: the pool refuses further work, the process continues
  kPoolExhausted,      ///< not enough blocks are available
  kDoubleFree,         ///< the freed block is not in use
  kUnknownBlock,       ///< an id that this layout never uses
  kNotRegistered,      ///< memory that is not registered for peers
  kNullBlock,          ///< block 0 is neither handed out nor freed
  kChannelTimeout,     ///< no acknowledgement before the deadline
  kChannelClosed,      ///< the other end of a ring has ended
  kSegment,            ///< the system refuses a shared file or a lock on it
  kSegmentExists,      ///< the file's name belongs to another instance or another kind of file
  kSegmentFormat,      ///< the bytes are not a segment of this version
  kStreamsUnknown,     ///< a GPU's driver does not know which streams use its pages
  kDeviceUnavailable,  ///< no driver, too old a one, or no such device
  kGuarantee,          ///< the guarantees exceed the device's capacity
  kReserve,            ///< other instances have not released the memory to be reserved
  kIntegrity,          ///< check_integrity() found an inconsistency
};

/// Returns the code as kvelastic/errors.py spells it, for example "DOUBLE_FREE".
constexpr std::string_view code_name(Errc code) {
  switch (code) {
    case Errc::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case Errc::kOutOfMemory:
      return "OUT_OF_MEMORY";
    case Errc::kMapping:
      return "MAPPING";
    case Errc::kPoolFailed:
      return "POOL_FAILED";
    case Errc::kPoolExhausted:
      return "POOL_EXHAUSTED";
    case Errc::kDoubleFree:
      return "DOUBLE_FREE";
    case Errc::kUnknownBlock:
      return "UNKNOWN_BLOCK";
    case Errc::kNotRegistered:
      return "NOT_REGISTERED";
    case Errc::kNullBlock:
      return "NULL_BLOCK";
    case Errc::kChannelTimeout:
      return "CHANNEL_TIMEOUT";
    case Errc::kChannelClosed:
      return "CHANNEL_CLOSED";
    case Errc::kSegment:
      return "SEGMENT";
    case Errc::kSegmentExists:
      return "SEGMENT_EXISTS";
    case Errc::kSegmentFormat:
      return "SEGMENT_FORMAT";
    case Errc::kStreamsUnknown:
      return "STREAMS_UNKNOWN";
    case Errc::kDeviceUnavailable:
      return "DEVICE_UNAVAILABLE";
    case Errc::kGuarantee:
      return "GUARANTEE";
    case Errc::kReserve:
      return "RESERVE";
    case Errc::kIntegrity:
      return "INTEGRITY";
  }
  return "UNKNOWN";
}

/// What happened, with which value, and what to do next.
struct Error {
  Errc code;
  std::string message;
};

/// A value or an Error. `if (!r) return r.error();` propagates a failure.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT(implicit)
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT(implicit)

  explicit operator bool() const { return state_.index() == 0; }
  T& operator*() & { return std::get<0>(state_); }
  const T& operator*() const& { return std::get<0>(state_); }
  T&& operator*() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &std::get<0>(state_); }
  const Error& error() const { return std::get<1>(state_); }

 private:
  std::variant<T, Error> state_;
};

/// Success, or an Error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}  // NOLINT(implicit)

  explicit operator bool() const { return !error_.has_value(); }
  const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

inline Status ok() {
  return {};
}

}  // namespace kvelastic
