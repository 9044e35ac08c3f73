// Results inside the native code. Nothing here throws; the binding turns a failed result into the
// exception of kvelastic/errors.py that has the same code.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvelastic {

/// The stable codes of kvelastic/errors.py that native code can answer with.
enum class Errc : std::uint8_t {
  kInvalidArgument,    ///< a value that no call accepts; names the value and what is accepted
  kOutOfMemory,        ///< the device (or the machine) has no memory for another page
  kMapping,            ///< the driver refused a map, an unmap or a reservation
  kPoolFailed,         ///< a rollback failed: the pool refuses further work, the process lives on
  kPoolExhausted,      ///< not that many blocks can be had now
  kDoubleFree,         ///< a block was freed that is not in use
  kUnknownBlock,       ///< an id that this layout never hands out
  kNotRegistered,      ///< memory that peers may not reach
  kNullBlock,          ///< block 0 is never handed out nor given back
  kChannelTimeout,     ///< a worker did not acknowledge before the deadline
  kChannelClosed,      ///< the other end of a ring is gone
  kSegment,            ///< a shared file, or a lock on it, that the system refuses
  kSegmentFormat,      ///< bytes that are not a segment of this version
  kStreamsUnknown,     ///< a GPU's driver was not told which streams use its pages
  kDeviceUnavailable,  ///< no driver, too old a one, or no such device
  kGuarantee,          ///< guarantees that add up to more than the device has
  kReserve,            ///< others have not given the memory that is to be reserved
  kIntegrity,          ///< check_integrity() found a rule broken
};

/// "DOUBLE_FREE" and so on: the text that kvelastic/errors.py knows.
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

/// A value or an Error. `if (!r) return r.error();` passes a failure on.
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
