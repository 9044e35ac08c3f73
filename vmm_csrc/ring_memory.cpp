#include "ring_memory.h"

#include <algorithm>
#include <cstring>

namespace kvelastic {

void RingMemory::Reason::write(const std::string& message) {
  const std::size_t length = std::min(message.size(), text.size());
  bytes = static_cast<std::uint32_t>(length);
  std::memcpy(text.data(), message.data(), length);
}

std::string RingMemory::Reason::read() const {
  return {text.data(), std::min<std::size_t>(bytes, text.size())};
}

Result<RingMemory*> as_ring(std::span<std::byte> memory) {
  if (memory.size() < sizeof(RingMemory)) {
    return Error{Errc::kInvalidArgument, "a ring needs " + std::to_string(sizeof(RingMemory)) +
                                             " bytes, the memory given has " +
                                             std::to_string(memory.size())};
  }
  if (reinterpret_cast<std::uintptr_t>(memory.data()) % alignof(RingMemory) != 0) {
    return Error{Errc::kInvalidArgument, "a ring must lie at a multiple of " +
                                             std::to_string(alignof(RingMemory)) + " bytes"};
  }
  return reinterpret_cast<RingMemory*>(memory.data());
}

std::vector<std::uint32_t> ring_words_of(std::span<const BlockMove> moves) {
  std::vector<std::uint32_t> words;
  words.reserve(moves.size() * kRingWordsPerMove);
  for (const BlockMove& move : moves) {
    for (const BlockId id : {move.from, move.to}) {
      words.push_back(static_cast<std::uint32_t>(id));
      words.push_back(static_cast<std::uint32_t>(id >> 32));
    }
  }
  return words;
}

std::vector<BlockMove> moves_of_ring_words(std::span<const std::uint32_t> words) {
  const auto id = [&](std::size_t at) {
    return static_cast<BlockId>(words[at] | std::uint64_t{words[at + 1]} << 32);
  };
  std::vector<BlockMove> moves;
  for (std::size_t at = 0; at + kRingWordsPerMove <= words.size(); at += kRingWordsPerMove) {
    moves.push_back({id(at), id(at + 2)});
  }
  return moves;
}

}  // namespace kvelastic
