// `kvelastic._vmm.RecordIo`: moves batches of tier objects between Python buffers and files.
#include "tiers/record_io.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "bind/buffers.h"
#include "bind/errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

RecordKey key_at(std::span<const std::byte> keys, std::size_t index) {
  RecordKey key{};
  std::memcpy(key.data(), keys.data() + index * key.size(), key.size());
  return key;
}

std::unique_ptr<RecordIo> make_record_io(const std::string& engine, unsigned depth) {
  EngineChoice choice = EngineChoice::kAuto;
  if (engine == "io_uring") {
    choice = EngineChoice::kUring;
  } else if (engine == "threads") {
    choice = EngineChoice::kThreads;
  } else if (engine != "auto") {
    raise_code("INVALID_ARGUMENT",
               "no engine is called '" + engine + "'; there are auto, io_uring and threads");
  }
  return unwrap(RecordIo::create(choice, depth));
}

using Place = std::pair<int, std::uint64_t>;
using PlaceList = nb::typed<nb::handle, std::vector<Place>>;
using Views = nb::typed<nb::handle, std::vector<nb::object>>;
using Bytes = nb::typed<nb::handle, nb::bytes>;

std::vector<std::pair<std::int64_t, std::uint64_t>> run(RecordIo& io, Way way, PlaceList places,
                                                        Views views, Bytes keys) {
  in_owner(io);
  Buffers buffers;
  // Copies, because the code that exports a view may change the caller's lists.
  const nb::list all_places(nb::borrow(places));
  const nb::list all_views(nb::borrow(views));
  const std::span<const std::byte> all_keys = buffers.add(keys, false);
  if (all_places.size() != all_views.size() ||
      all_keys.size() != all_views.size() * sizeof(RecordKey)) {
    raise_code("INVALID_ARGUMENT", std::to_string(all_places.size()) + " places, " +
                                       std::to_string(all_views.size()) + " views and " +
                                       std::to_string(all_keys.size()) +
                                       " bytes of keys; each record has one, one and 16");
  }
  std::vector<RecordPiece> pieces(all_views.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto [fd, offset] = nb::cast<Place>(all_places[i]);
    const std::span<std::byte> view = buffers.add(all_views[i], way == Way::kRead);
    pieces[i] = {.fd = fd,
                 .offset = offset,
                 .data = view.data(),
                 .bytes = view.size(),
                 .key = key_at(all_keys, i)};
  }
  without_gil([&] {
    io.run(way, pieces);
    return 0;
  });
  std::vector<std::pair<std::int64_t, std::uint64_t>> answers;
  for (const RecordPiece& piece : pieces) answers.emplace_back(piece.result, piece.checksum);
  return answers;
}

}  // namespace

void bind_record_io(nb::module_& m) {
  nb::class_<RecordIo>(
      m, "RecordIo",
      "Moves batches of objects between memory and files; see vmm_csrc/tiers/record_io.h. Any "
      "thread, but not in a forked child. Calls block for the file I/O, without the GIL.")
      .def(nb::new_(&make_record_io), "engine"_a = "auto", "depth"_a = 32,
           "`engine` is auto, io_uring or threads. `depth` (1 to 256) is the number of objects of "
           "one call in flight at a time. Raises InvalidArgumentError, and DeviceUnavailableError "
           "if io_uring is requested but not available.")
      .def_prop_ro(
          "engine", [](const RecordIo& io) { return std::string(io.engine()); },
          "The engine in use: io_uring or threads.")
      .def_prop_ro("depth", &RecordIo::depth)
      .def(
          "write",
          [](RecordIo& io, PlaceList places, Views views, Bytes keys) {
            return run(io, Way::kWrite, places, views, keys);
          },
          "places"_a, "views"_a, "keys"_a,
          "Write each view to its place (fd, offset). Returns (result, checksum) for each: the "
          "bytes written, or a negative errno, and the checksum of its bytes, seeded with its "
          "16-byte key. If a file is open with O_DIRECT, offsets must be multiples of 4096. Views "
          "that are not aligned are copied through aligned memory and padded with zeros.")
      .def(
          "read",
          [](RecordIo& io, PlaceList places, Views views, Bytes keys) {
            return run(io, Way::kRead, places, views, keys);
          },
          "places"_a, "views"_a, "keys"_a,
          "Read each view from its place (fd, offset). Returns (result, checksum) for each, as "
          "write(). If the result is less than the size of the view, the file ends there and the "
          "checksum is meaningless.");
  m.def(
      "record_checksum",
      [](nb::handle buffer, Bytes key) {
        Buffers buffers;
        const std::span<const std::byte> bytes = buffers.add(buffer, false);
        const std::span<const std::byte> seed = buffers.add(key, false);
        if (seed.size() != sizeof(RecordKey)) {
          raise_code("INVALID_ARGUMENT",
                     "a key of " + std::to_string(seed.size()) + " bytes; a key has 16");
        }
        return record_checksum(bytes, key_at(seed, 0));
      },
      "buffer"_a, "key"_a,
      "Return the checksum that RecordIo computes for these bytes with this 16-byte key.");
  m.def(
      "release_range",
      [](int fd, std::uint64_t offset, std::uint64_t bytes) {
        return without_gil([&] { return release_range(fd, offset, bytes); });
      },
      "fd"_a, "offset"_a, "bytes"_a,
      "Release the disk space of a part of a file, which then reads as zeros. Returns 0 or an "
      "errno.");
  m.def(
      "zero_range",
      [](int fd, std::uint64_t offset, std::uint64_t bytes) {
        return without_gil([&] { return zero_range(fd, offset, bytes); });
      },
      "fd"_a, "offset"_a, "bytes"_a,
      "Make a part of a file read as zeros. It keeps its disk space. Returns 0 or an errno.");
}

}  // namespace kvelastic
