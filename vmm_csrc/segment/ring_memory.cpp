#include "segment/ring_memory.h"

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

namespace {

void push(std::vector<std::uint32_t>& words, std::uint64_t value) {
  words.push_back(static_cast<std::uint32_t>(value));
  words.push_back(static_cast<std::uint32_t>(value >> 32));
}

std::uint64_t value_at(std::span<const std::uint32_t> words, std::size_t at) {
  return words[at] | std::uint64_t{words[at + 1]} << 32;
}

}  // namespace

std::vector<std::uint32_t> ring_words_of(std::span<const BlockMove> moves) {
  std::vector<std::uint32_t> words;
  words.reserve(moves.size() * kRingWordsPerMove);
  for (const BlockMove& move : moves) {
    push(words, static_cast<std::uint64_t>(move.from));
    push(words, static_cast<std::uint64_t>(move.to));
  }
  return words;
}

std::vector<BlockMove> moves_of_ring_words(std::span<const std::uint32_t> words) {
  std::vector<BlockMove> moves;
  for (std::size_t at = 0; at + kRingWordsPerMove <= words.size(); at += kRingWordsPerMove) {
    moves.push_back(
        {static_cast<BlockId>(value_at(words, at)), static_cast<BlockId>(value_at(words, at + 2))});
  }
  return moves;
}

std::vector<std::uint32_t> ring_words_of(std::span<const BlockSlot> blocks) {
  std::vector<std::uint32_t> words;
  words.reserve(blocks.size() * kRingWordsPerBlockSlot);
  for (const BlockSlot& block : blocks) {
    push(words, static_cast<std::uint64_t>(block.id));
    push(words, block.slot);
  }
  return words;
}

std::vector<BlockSlot> block_slots_of_ring_words(std::span<const std::uint32_t> words) {
  std::vector<BlockSlot> blocks;
  for (std::size_t at = 0; at + kRingWordsPerBlockSlot <= words.size();
       at += kRingWordsPerBlockSlot) {
    blocks.push_back({static_cast<BlockId>(value_at(words, at)), value_at(words, at + 2)});
  }
  return blocks;
}

std::vector<std::uint32_t> ring_words_of(const StagingName& name) {
  std::vector<std::uint32_t> words;
  for (const std::uint64_t value : {name.pid, name.fd, name.slots, name.record_bytes}) {
    push(words, value);
  }
  return words;
}

StagingName staging_of_ring_words(std::span<const std::uint32_t> words) {
  if (words.size() != 8) return {};  // an empty name, which cannot be attached
  return {value_at(words, 0), value_at(words, 2), value_at(words, 4), value_at(words, 6)};
}

}  // namespace kvelastic
