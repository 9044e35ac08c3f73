// Blocks of an engine's tensors, to and from staging.
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "driver/host_driver.h"
#include "pool/engine_blocks.h"

namespace kvelastic {
namespace {

constexpr std::size_t kRow = 24;
constexpr std::uint64_t kBlocks = 5;

/// K and V of two layers, each a tensor [2][blocks][row]: row r of layer l of block b is known.
struct Tensors {
  std::vector<std::byte> layers[2];

  Tensors() {
    for (auto& layer : layers) layer.assign(2 * kBlocks * kRow, std::byte{0});
  }
  std::byte* row(std::size_t layer, std::size_t kv, std::size_t block) {
    return layers[layer].data() + (kv * kBlocks + block) * kRow;
  }
  void fill() {
    for (std::size_t layer = 0; layer < 2; ++layer) {
      for (std::size_t kv = 0; kv < 2; ++kv) {
        for (std::size_t block = 0; block < kBlocks; ++block) {
          std::memset(row(layer, kv, block), static_cast<int>(1 + layer + 2 * kv + 4 * block),
                      kRow);
        }
      }
    }
  }
  std::vector<BlockPart> parts() {
    return {{layers[0].data(), kRow, kRow, 2, kBlocks * kRow},
            {layers[1].data(), kRow, kRow, 2, kBlocks * kRow}};
  }
};

std::shared_ptr<Driver> host() {
  auto opened = HostDriver::open();
  return opened ? std::shared_ptr<Driver>(std::move(*opened)) : nullptr;
}

TEST(engine_blocks_round_trip_parts_in_order) {
  Tensors from, to;
  from.fill();
  auto out = EngineBlocks::create(host(), from.parts(), kBlocks);
  auto in = EngineBlocks::create(host(), to.parts(), kBlocks);
  REQUIRE(out && in);
  CHECK((*out)->record_bytes() == 4 * kRow);
  auto made = Staging::create(3, 8 + 4 * kRow);
  REQUIRE(made);
  const std::shared_ptr<Staging> staging(std::move(*made));
  const std::vector<BlockSlot> pairs{{3, 2}, {0, 0}};
  REQUIRE((*out)->copy(pairs, staging, 8, CopyTo::kHost));
  const std::byte* record = staging->record(2).data() + 8;
  // layer 0: K, V; layer 1: K, V; of block 3
  const int expected[] = {1 + 12, 3 + 12, 2 + 12, 4 + 12};
  for (std::size_t i = 0; i < 4; ++i)
    CHECK(record[i * kRow] == static_cast<std::byte>(expected[i]));
  const std::vector<BlockSlot> elsewhere{{1, 2}};
  REQUIRE((*in)->copy(elsewhere, staging, 8, CopyTo::kDevice));
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (std::size_t kv = 0; kv < 2; ++kv) {
      CHECK(std::memcmp(to.row(layer, kv, 1), from.row(layer, kv, 3), kRow) == 0);
      CHECK(to.row(layer, kv, 2)[0] == std::byte{0});
    }
  }
}

TEST(engine_blocks_refuse_invalid_ids_without_copying) {
  Tensors tensors;
  tensors.fill();
  auto blocks = EngineBlocks::create(host(), tensors.parts(), kBlocks);
  REQUIRE(blocks);
  auto made = Staging::create(2, 4 * kRow);
  REQUIRE(made);
  const std::shared_ptr<Staging> staging(std::move(*made));
  const auto refused = [&](std::vector<BlockSlot> pairs, std::uint64_t offset) {
    const Status status = (*blocks)->copy(pairs, staging, offset, CopyTo::kHost);
    return !status && status.error().code == Errc::kInvalidArgument;
  };
  CHECK(refused({{0, 0}, {5, 1}}, 0));
  CHECK(refused({{0, 0}, {-1, 1}}, 0));
  CHECK(refused({{0, 0}, {1, 2}}, 0));
  CHECK(refused({{0, 0}}, 1));
  CHECK(refused({{0, 0}}, ~std::uint64_t{0}));
  CHECK(staging->record(0)[0] == std::byte{0});
}

TEST(engine_blocks_refuse_invalid_parts) {
  std::byte memory[64];
  const auto refused = [](std::vector<BlockPart> parts, std::uint64_t blocks) {
    return !EngineBlocks::create(host(), std::move(parts), blocks);
  };
  CHECK(refused({}, 1));
  CHECK(refused({{memory, 8, 8, 1, 8}}, 0));
  CHECK(refused({{nullptr, 8, 8, 1, 8}}, 1));
  CHECK(refused({{memory, 8, 0, 1, 8}}, 1));
  CHECK(refused({{memory, 8, 8, 0, 8}}, 1));
  CHECK(refused({{memory, 8, 8, 2, 4}}, 1));
  CHECK(refused({{memory, std::uint64_t{1} << 40, 8, 1, 8}}, std::uint64_t{1} << 40));
  CHECK(refused({{memory, 8, std::uint64_t{1} << 40, std::uint64_t{1} << 40, 8}}, 1));
}

}  // namespace
}  // namespace kvelastic
