#include "tiers/found_records.h"

#include <algorithm>
#include <cstring>

#include "tiers/record_checksum.h"

namespace kvelastic {
namespace {

using checksum_detail::word_at;

constexpr std::size_t kSummedBytes = FoundRecords::kEntryBytes - sizeof(std::uint64_t);
constexpr std::size_t kOwnerAt = 32, kLengthAt = 72, kStoredAt = 80, kChecksumAt = 88,
                      kPositionAt = 96;

/// Of one batch the ends of chains, which come later in it, are older.
bool is_older(const FoundRecords::Record& a, const FoundRecords::Record& b) {
  if (a.stored_ns != b.stored_ns) return a.stored_ns < b.stored_ns;
  return a.position > b.position;
}

BlockKey key_at(const std::byte* at) {
  return BlockKey::load(reinterpret_cast<const char*>(at));
}

/// What the checksum of an entry is seeded with: the file, and the slot in it.
RecordKey place_of(const FoundRecords::FileId& file, std::uint64_t own) {
  RecordKey place{};
  std::memcpy(place.data(), file.data(), 8);
  for (std::size_t i = 0; i < 8; ++i) place[8 + i] = static_cast<std::byte>(own >> (8 * i));
  return place;
}

}  // namespace

FoundRecords::Added FoundRecords::add(std::span<const std::byte> entries, const Part& part) {
  Added added;
  const std::size_t count = entries.size() / kEntryBytes;
  for (std::size_t i = 0; i < count; ++i) {
    const std::span<const std::byte> entry = entries.subspan(i * kEntryBytes, kEntryBytes);
    const std::uint64_t own = part.first_own + i;
    const auto is_zero = [](std::byte each) { return each == std::byte{0}; };
    if (std::all_of(entry.begin(), entry.end(), is_zero)) {
      added.empty.push_back(static_cast<std::int64_t>(own));
      continue;
    }
    const std::uint64_t checksum =
        record_checksum(entry.first(kSummedBytes), place_of(part.file_id, own));
    const BlockKey key = key_at(entry.data());
    if (checksum != word_at(entry.data() + kSummedBytes) || key.is_none() ||
        word_at(entry.data() + kLengthAt) != part.record_bytes || own >= part.whole_slots) {
      added.torn.push_back(static_cast<std::int64_t>(own));
      continue;
    }
    Owner owner;
    std::memcpy(owner.data(), entry.data() + kOwnerAt, kOwnerBytes);
    unsorted_.push_back({key, key_at(entry.data() + sizeof(BlockKey)),
                         word_at(entry.data() + kChecksumAt), word_at(entry.data() + kStoredAt),
                         word_at(entry.data() + kPositionAt),
                         static_cast<std::uint32_t>(part.first_slot + i), number_of(owner)});
    ++left_;
  }
  return added;
}

void FoundRecords::end_file() {
  std::sort(unsorted_.begin(), unsorted_.end(),
            [](const Record& a, const Record& b) { return is_older(b, a); });
  if (!unsorted_.empty()) files_.push_back(std::move(unsorted_));
  unsorted_.clear();
}

FoundRecords::Restored FoundRecords::restore(TierIndex& index, std::size_t most) {
  Restored restored;
  const auto is_younger = [](const auto& a, const auto& b) { return is_older(b.back(), a.back()); };
  std::make_heap(files_.begin(), files_.end(), is_younger);
  while (left_ > 0 && restored.records.size() + restored.refused.size() < most) {
    std::pop_heap(files_.begin(), files_.end(), is_younger);
    std::vector<Record>& oldest = files_.back();
    const Record record = oldest.back();
    oldest.pop_back();
    --left_;
    if (oldest.empty()) {
      files_.pop_back();
    } else {
      std::push_heap(files_.begin(), files_.end(), is_younger);
    }
    const Result<bool> is_there = index.restore(record.key, record.slot, record.parent);
    if (is_there && *is_there) {
      restored.records.push_back(record);
    } else {
      restored.refused.push_back(record.slot);
    }
  }
  return restored;
}

std::uint32_t FoundRecords::number_of(const Owner& owner) {
  const auto [at, is_new] = numbers_.try_emplace(owner, static_cast<std::uint32_t>(owners_.size()));
  if (is_new) owners_.push_back(owner);
  return at->second;
}

}  // namespace kvelastic
