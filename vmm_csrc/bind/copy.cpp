// `kvelastic._vmm`: copies between blocks of a range in this process and Python buffers.
#include <nanobind/nanobind.h>

#include <span>
#include <string>
#include <thread>
#include <vector>

#include "bind/buffers.h"
#include "bind/errors.h"
#include "bind/ids.h"
#include "pages/range.h"
#include "transfer/host_copies.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

Error refuse(std::string what) {
  return {Errc::kInvalidArgument, std::move(what)};
}

/// Returns the address of a block. Fails with kInvalidArgument if the block does not exist, its
/// page is not mapped, or it has fewer than `bytes` bytes.
Result<std::byte*> block_address(const Range& range, BlockId id, std::size_t bytes) {
  const Geometry& geometry = range.geometry();
  const std::string name = "block " + std::to_string(id);
  const std::uint64_t ids = geometry.range_bytes() / geometry.block_bytes;
  if (id < 0 || static_cast<std::uint64_t>(id) >= ids) {
    return refuse(name + " lies outside the range");
  }
  const PageIndex page = geometry.page_of(id);
  const BlockId first = geometry.first_id(page);
  if (id < first || static_cast<std::uint64_t>(id - first) >= geometry.blocks_per_page) {
    return refuse(name + " lies between two pages");
  }
  if (!range.is_mapped(page)) {
    return refuse(name + " is of a page that is not mapped; copy blocks in use only");
  }
  if (bytes > geometry.block_bytes) {
    return refuse("a buffer of " + std::to_string(bytes) + " bytes is larger than " + name +
                  ", which has " + std::to_string(geometry.block_bytes));
  }
  return range.address() + geometry.block_offset(id, 0, 0);
}

enum class Direction : std::uint8_t { kIntoBlocks, kOutOfBlocks };

/// All or nothing: checks every block before it copies the first byte.
Status copy_all(const Range& range, const std::vector<BlockId>& ids, const Buffers& buffers,
                Direction direction) {
  std::vector<MemoryCopy> copies;
  copies.reserve(ids.size());
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Result<std::byte*> address = block_address(range, ids[i], buffers[i].size());
    if (!address) return address.error();
    const std::span<std::byte> buffer = buffers[i];
    if (direction == Direction::kIntoBlocks) {
      copies.push_back({*address, buffer.data(), buffer.size()});
    } else {
      copies.push_back({buffer.data(), *address, buffer.size()});
    }
    bytes += buffer.size();
  }
  copy_memory(copies, copy_threads(bytes, std::thread::hardware_concurrency()));
  return ok();
}

template <Direction direction>
void copy_blocks(const Range& range, Integers ids, nb::typed<nb::sequence, nb::memoryview> views) {
  in_owner(range);
  const std::vector<BlockId> blocks = integers_of(ids);
  const Geometry& geometry = range.geometry();
  if (range.driver().device().type != DeviceKind::kHost || geometry.extents_per_page != 1 ||
      geometry.buffers_per_extent != 1) {
    raise_code("INVALID_ARGUMENT", "blocks of one buffer in the host's memory are copied so only");
  }
  Buffers buffers;
  for (nb::handle view : views) buffers.add(view, direction == Direction::kOutOfBlocks);
  if (buffers.size() != blocks.size()) {
    raise_code("INVALID_ARGUMENT", std::to_string(blocks.size()) + " blocks and " +
                                       std::to_string(buffers.size()) +
                                       " buffers; pass one for each");
  }
  check(without_gil([&] { return copy_all(range, blocks, buffers, direction); }));
}

}  // namespace

void bind_copy(nb::module_& m) {
  m.def("write_blocks", &copy_blocks<Direction::kIntoBlocks>, "range"_a, "ids"_a, "buffers"_a,
        "Copy each buffer to the first bytes of its block, without the GIL. The caller must use "
        "the blocks, which must lie in host memory in a single buffer. Raises "
        "InvalidArgumentError, with nothing copied, if a block does not exist or is not mapped, or "
        "if a buffer is larger than its block.");
  m.def("read_blocks", &copy_blocks<Direction::kOutOfBlocks>, "range"_a, "ids"_a, "buffers"_a,
        "Copy the first bytes of each block to its buffer, which must be writable. Otherwise as "
        "write_blocks().");
}

}  // namespace kvelastic
