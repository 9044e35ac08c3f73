// `kvelastic._vmm`: the index of a tier, and the keys of blocks.
//
// The index's mutex is held for microseconds and never while Python's lock is wanted, so calls wait
// for it with Python's lock held; only what goes over all slots lets go of that.
#include "tiers/tier_index.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bind/buffers.h"
#include "bind/errors.h"
#include "bind/ids.h"
#include "pool/block_keys.h"
#include "tiers/found_records.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

BlockKey key_of(const nb::bytes& bytes) {
  if (bytes.size() != BlockKey::kBytes) {
    raise_code("INVALID_ARGUMENT",
               "a key has 16 bytes, not " + std::to_string(bytes.size()) + "; pass one whole key");
  }
  return BlockKey::load(bytes.data());
}

/// The keys in a bytes object: no copy where they lie aligned, as those of CPython do.
class Keys {
 public:
  explicit Keys(const nb::bytes& bytes) {
    const std::size_t count = bytes.size() / BlockKey::kBytes;
    if (bytes.size() % BlockKey::kBytes != 0) {
      raise_code("INVALID_ARGUMENT", "keys have " + std::to_string(bytes.size()) +
                                         " bytes, no multiple of 16; pass whole keys");
    }
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(BlockKey) == 0) {
      keys_ = {reinterpret_cast<const BlockKey*>(bytes.data()), count};
      return;
    }
    copy_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      copy_[i] = BlockKey::load(static_cast<const char*>(bytes.data()) + i * BlockKey::kBytes);
    }
    keys_ = copy_;
  }
  Keys(const Keys&) = delete;
  Keys& operator=(const Keys&) = delete;

  operator std::span<const BlockKey>() const { return keys_; }  // NOLINT(implicit)
  std::size_t size() const { return keys_.size(); }

 private:
  std::span<const BlockKey> keys_;
  std::vector<BlockKey> copy_;
};

nb::object list_of_records(const std::vector<KeyInSlot>& records) {
  const nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(records.size())));
  if (!list.is_valid()) throw nb::python_error();
  for (std::size_t i = 0; i < records.size(); ++i) {
    char key[BlockKey::kBytes];
    records[i].key.store(key);
    NB_LIST_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i),
                     nb::make_tuple(nb::bytes(key, sizeof(key)), records[i].slot).release().ptr());
  }
  return list;
}

std::shared_ptr<TierIndex> make_index(std::uint64_t slots, const std::string& policy) {
  const auto known = eviction_policy_of(policy);
  if (!known) {
    raise_code("INVALID_ARGUMENT",
               "\"" + policy + "\" is no policy of eviction; use lru, lfu, slru or fifo");
  }
  return unwrap(without_gil([&] { return TierIndex::create(slots, *known); }));
}

nb::list has(const TierIndex& index, const nb::bytes& bytes) {
  const Keys keys(bytes);
  const std::unique_ptr<bool[]> answers(new bool[keys.size()]());
  index.has(keys, {answers.get(), keys.size()});
  nb::list list;
  for (std::size_t i = 0; i < keys.size(); ++i) list.append(nb::bool_(answers[i]));
  return list;
}

nb::tuple lease(TierIndex& index, const nb::bytes& keys) {
  const TierIndex::Leased leased = index.lease(Keys(keys));
  return nb::make_tuple(leased.ticket, list_of(leased.slots));
}

nb::tuple claim(TierIndex& index, const nb::bytes& keys, const std::optional<nb::bytes>& after) {
  TierIndex::Chain chain;
  if (after) chain = {true, key_of(*after)};
  const TierIndex::Claimed claimed = unwrap(index.claim(Keys(keys), chain));
  return nb::make_tuple(list_of(claimed.slots), list_of_records(claimed.displaced));
}

nb::dict stats(const TierIndex& index) {
  const TierIndex::Stats now = index.stats();
  nb::dict dict;
  dict["slots"] = now.slots;
  dict["ready"] = now.ready;
  dict["pending"] = now.pending;
  dict["closed"] = now.closed;
  dict["leased"] = now.leased;
  dict["displaced"] = now.displaced;
  return dict;
}

template <typename F>
nb::bytes packed(const std::vector<FoundRecords::Record>& records, F field) {
  using Field = decltype(field(records[0]));
  std::vector<Field> fields;
  fields.reserve(records.size());
  for (const FoundRecords::Record& record : records) fields.push_back(field(record));
  return nb::bytes(reinterpret_cast<const char*>(fields.data()), fields.size() * sizeof(Field));
}

nb::tuple add_entries(FoundRecords& found, nb::handle entries, const nb::bytes& file_id,
                      std::uint64_t first_own, std::uint64_t first_slot, std::uint64_t record_bytes,
                      std::uint64_t whole_slots) {
  FoundRecords::Part part{{}, first_own, first_slot, record_bytes, whole_slots};
  if (file_id.size() != part.file_id.size()) {
    raise_code("INVALID_ARGUMENT", "a file's number has 16 bytes, not " +
                                       std::to_string(file_id.size()) + "; pass the header's");
  }
  std::memcpy(part.file_id.data(), file_id.data(), part.file_id.size());
  Buffers buffers;
  const std::span<const std::byte> raw = buffers.add(entries, false);
  FoundRecords::Added added;
  {
    const GilReleased unlocked;
    added = found.add(raw, part);
  }
  return nb::make_tuple(list_of(added.empty), list_of(added.torn));
}

nb::tuple restore_found(FoundRecords& found, TierIndex& index, std::size_t most) {
  FoundRecords::Restored restored;
  {
    const GilReleased unlocked;
    restored = found.restore(index, most);
  }
  using Record = FoundRecords::Record;
  const std::vector<Record>& records = restored.records;
  return nb::make_tuple(packed(records, [](const Record& one) { return one.slot; }),
                        packed(records, [](const Record& one) { return one.key; }),
                        packed(records, [](const Record& one) { return one.checksum; }),
                        packed(records, [](const Record& one) { return one.stored_ns; }),
                        packed(records, [](const Record& one) { return one.owner; }),
                        list_of(restored.refused));
}

/// A view of 64-bit integers that somebody else owns.
class Tokens {
 public:
  explicit Tokens(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      throw nb::python_error();
    }
    std::string format = view_.format == nullptr ? "B" : view_.format;
    if (format.size() == 2 && std::string("@=<").find(format[0]) != std::string::npos) {
      format.erase(0, 1);
    }
    if ((format != "q" && format != "l") || view_.itemsize != sizeof(std::int64_t)) {
      PyBuffer_Release(&view_);
      raise_code("INVALID_ARGUMENT", "tokens of format \"" + format +
                                         "\"; pass a buffer of int64, as array('q') or NumPy has");
    }
    if (view_.len != 0 &&
        reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(std::int64_t) != 0) {
      PyBuffer_Release(&view_);
      raise_code("INVALID_ARGUMENT", "tokens do not lie at a multiple of 8 bytes; copy them");
    }
  }
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;
  ~Tokens() { PyBuffer_Release(&view_); }

  std::span<const std::int64_t> all() const {
    return {static_cast<const std::int64_t*>(view_.buf),
            static_cast<std::size_t>(view_.len) / sizeof(std::int64_t)};
  }

 private:
  Py_buffer view_{};
};

nb::object keys_of_tokens(nb::handle tokens, std::int64_t block_tokens, const nb::bytes& seed) {
  if (block_tokens <= 0) {
    raise_code("INVALID_ARGUMENT",
               "blocks of " + std::to_string(block_tokens) + " tokens; they have one or more");
  }
  const BlockKey first = key_of(seed);
  const Tokens view(tokens);
  const std::span<const std::int64_t> all = view.all();
  const auto per_block = static_cast<std::size_t>(block_tokens);
  const std::size_t bytes = all.size() / per_block * BlockKey::kBytes;
  const nb::object keys =
      nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
  if (!keys.is_valid()) throw nb::python_error();
  const std::span<std::byte> out(reinterpret_cast<std::byte*>(PyBytes_AsString(keys.ptr())), bytes);
  constexpr std::size_t kLong = 1 << 16;  // a tenth of a millisecond
  if (all.size() < kLong) {
    block_keys(all, per_block, first, out);
  } else {
    const GilReleased unlocked;
    block_keys(all, per_block, first, out);
  }
  return keys;
}

}  // namespace

void bind_tier_index(nb::module_& m) {
  m.def(
      "block_keys", &keys_of_tokens, "tokens"_a, "block_tokens"_a, "seed"_a,
      "The 16-byte keys of all whole blocks of `tokens` (a buffer of int64), side by side; each "
      "stands for all tokens up to its end. `seed`: a namespace's fingerprint, or the key before "
      "the first. Not cryptographic: see vmm_csrc/pool/block_keys.h. Raises InvalidArgumentError.");
  nb::class_<FoundRecords>(m, "FoundRecords",
                           "Records of files that were taken over, on their way into an index; "
                           "see vmm_csrc/tiers/found_records.h. One thread at a time.")
      .def(nb::init<>())
      .def("add", &add_entries, "entries"_a, "file_id"_a, "first_own"_a, "first_slot"_a,
           "record_bytes"_a, "whole_slots"_a,
           "(empty, torn): of a part of a file's table, the file's slots without an entry, and "
           "those whose entry is not whole. Lets go of the GIL.")
      .def("end_file", &FoundRecords::end_file, "All parts of a file were added.",
           nb::call_guard<nb::gil_scoped_release>())
      .def("restore", &restore_found, "index"_a, "most"_a,
           "Restore up to `most` records, the oldest of all files first: (slots as uint32, keys, "
           "checksums and times as uint64, owners as uint32, refused slots). Lets go of the GIL.")
      .def_prop_ro("left", &FoundRecords::left, "Records that were not restored yet.")
      .def(
          "owners",
          [](const FoundRecords& found) {
            nb::list all;
            for (const FoundRecords::Owner& owner : found.owners()) {
              all.append(nb::bytes(reinterpret_cast<const char*>(owner.data()), owner.size()));
            }
            return all;
          },
          "40 bytes each: namespace, model, generation.");
  nb::class_<TierIndex>(m, "TierIndex",
                        "Which keys a tier has, in which slots, and who goes when one is wanted; "
                        "see vmm_csrc/tiers/tier_index.h. Any thread may call anything.")
      .def(nb::new_(&make_index), "slots"_a, "policy"_a = "slru",
           "Room for `slots` records; policy: lru, lfu, slru or fifo. Raises InvalidArgumentError.")
      .def("has", &has, "keys"_a, "For each key whether it is ready. Changes nothing.")
      .def(
          "leading",
          [](const TierIndex& index, const nb::bytes& keys) {
            const TierIndex::Leading counts = index.leading(Keys(keys));
            return nb::make_tuple(counts.ready, counts.known);
          },
          "keys"_a,
          "(ready, known): how many leading keys are ready, and how many ready or pending. Changes "
          "nothing.")
      .def(
          "match", [](TierIndex& index, const nb::bytes& keys) { return index.match(Keys(keys)); },
          "keys"_a, "How many leading keys are ready; a use of these.")
      .def("lease", &lease, "keys"_a,
           "(ticket, slots) of the leading ready keys, held until release(); a use of these.")
      .def(
          "release",
          [](TierIndex& index, std::uint64_t ticket) {
            return list_of_records(unwrap(index.release(ticket)));
          },
          "ticket"_a,
          "End a lease; (key, slot) of what was erased meanwhile and is free now. Raises "
          "InvalidArgumentError for one that has ended.")
      .def("claim", &claim, "keys"_a, "chain_after"_a.none() = nb::none(),
           "(slots, displaced): a slot for each new key, which is pending then; -1: there or "
           "pending already; -2: no room that may be taken. `displaced`: (key, slot) of records "
           "that are gone for it. With `chain_after` each key continues the one before it, and the "
           "first one that key (zeros: nothing). Raises InvalidArgumentError.")
      .def(
          "commit",
          [](TierIndex& index, const nb::bytes& keys) {
            return list_of_records(unwrap(index.commit(Keys(keys))));
          },
          "keys"_a,
          "These pending keys are ready now. Answers (key, slot) of those that are gone instead: "
          "erased, or above a smaller size. Raises InvalidArgumentError where one is not pending, "
          "and changes nothing then.")
      .def(
          "abandon",
          [](TierIndex& index, const nb::bytes& keys) { check(index.abandon(Keys(keys))); },
          "keys"_a, "These pending keys are gone, their slots free. Raises InvalidArgumentError.")
      .def(
          "slot_of",
          [](const TierIndex& index, const nb::bytes& key) { return index.slot_of(key_of(key)); },
          "key"_a, "Where a ready key lies; -1: it is not ready.")
      .def(
          "erase",
          [](TierIndex& index, const nb::bytes& keys) {
            return list_of_records(index.erase(Keys(keys)));
          },
          "keys"_a,
          "Forget keys; (key, slot) of those that are free now. Leased ones are reported by "
          "release(), pending ones by commit().")
      .def(
          "restore",
          [](TierIndex& index, const nb::bytes& key, std::uint64_t slot,
             const std::optional<nb::bytes>& chain_after) {
            return unwrap(
                index.restore(key_of(key), slot, chain_after ? key_of(*chain_after) : BlockKey{}));
          },
          "key"_a, "slot"_a, "chain_after"_a.none() = nb::none(),
          "A record found in a slot, ready now. False: key or slot taken, or no such slot.")
      .def(
          "resize",
          [](TierIndex& index, std::uint64_t slots) {
            return list_of_records(unwrap(without_gil([&] { return index.resize(slots); })));
          },
          "slots"_a,
          "As many slots from now on; (key, slot) of the records displaced. Slots above are never "
          "given out again. Leased ones there are reported by release(), pending ones by commit().")
      .def("close", &TierIndex::close, "first"_a, "count"_a,
           "Free slots among `count` from `first` on are given out by none but restore().")
      .def(
          "open",
          [](TierIndex& index, const std::vector<std::int64_t>& slots) {
            check(index.open(slots));
          },
          "slots"_a,
          "These closed slots are free. Raises InvalidArgumentError where one is not closed, and "
          "opens none then.")
      .def("stats", &stats, "slots, ready, pending, closed, leased, displaced: counts.")
      .def(
          "check_integrity",
          [](const TierIndex& index) {
            check(without_gil([&] { return index.check_integrity(); }));
          },
          "Raises IntegrityError naming what disagrees.");
}

}  // namespace kvelastic
