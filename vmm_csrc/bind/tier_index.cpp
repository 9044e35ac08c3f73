// `kvelastic._vmm`: the index of a tier, and the keys of blocks.
//
// A thread holds the index's mutex for microseconds and never waits for the GIL in that time, so
// calls keep the GIL while they wait for the mutex. Only calls that visit all slots release the
// GIL.
#include "tiers/tier_index.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/buffers.h"
#include "bind/errors.h"
#include "bind/ids.h"
#include "bind/signatures.h"
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

/// The keys in a bytes object. Copies them only if they are not aligned; CPython aligns them.
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

using Slots = IntegerList;
using Records = nb::typed<nb::list, std::pair<nb::bytes, std::uint32_t>>;

Records list_of_records(const std::vector<KeyInSlot>& records) {
  const Records list = nb::steal<Records>(PyList_New(static_cast<Py_ssize_t>(records.size())));
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

nb::typed<nb::list, bool> has(const TierIndex& index, const nb::bytes& bytes) {
  const Keys keys(bytes);
  const std::unique_ptr<bool[]> answers(new bool[keys.size()]());
  index.has(keys, {answers.get(), keys.size()});
  nb::list list;
  for (std::size_t i = 0; i < keys.size(); ++i) list.append(nb::bool_(answers[i]));
  return list;
}

nb::typed<nb::tuple, std::uint64_t, Slots> hold(TierIndex& index, const nb::bytes& keys) {
  const TierIndex::Held held = index.hold(Keys(keys));
  return nb::make_tuple(held.ticket, list_of(held.slots));
}

nb::typed<nb::tuple, Slots, Records> claim(TierIndex& index, const nb::bytes& keys,
                                           const std::optional<nb::bytes>& after) {
  TierIndex::Chain chain;
  if (after) chain = {true, key_of(*after)};
  const TierIndex::Claimed claimed = unwrap(index.claim(Keys(keys), chain));
  return nb::make_tuple(list_of(claimed.slots), list_of_records(claimed.displaced));
}

Counts stats(const TierIndex& index) {
  const TierIndex::Stats now = index.stats();
  nb::dict dict;
  dict["slots"] = now.slots;
  dict["ready"] = now.ready;
  dict["pending"] = now.pending;
  dict["closed"] = now.closed;
  dict["held"] = now.held;
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

std::pair<Slots, Slots> add_entries(FoundRecords& found, nb::handle entries,
                                    const nb::bytes& file_id, std::uint64_t first_own,
                                    std::uint64_t first_slot, std::uint64_t record_bytes,
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
  return {list_of(added.empty), list_of(added.torn)};
}

std::tuple<nb::bytes, nb::bytes, nb::bytes, nb::bytes, nb::bytes, Slots> restore_found(
    FoundRecords& found, TierIndex& index, std::size_t most) {
  FoundRecords::Restored restored;
  {
    const GilReleased unlocked;
    restored = found.restore(index, most);
  }
  using Record = FoundRecords::Record;
  const std::vector<Record>& records = restored.records;
  return {packed(records, [](const Record& one) { return one.slot; }),
          packed(records, [](const Record& one) { return one.key; }),
          packed(records, [](const Record& one) { return one.checksum; }),
          packed(records, [](const Record& one) { return one.stored_ns; }),
          packed(records, [](const Record& one) { return one.owner; }),
          list_of(restored.refused)};
}

/// A view of the 64-bit integers in a Python buffer, held until this is destroyed.
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

nb::bytes keys_of_tokens(nb::handle tokens, std::int64_t block_tokens, const nb::bytes& seed) {
  if (block_tokens <= 0) {
    raise_code("INVALID_ARGUMENT",
               "blocks of " + std::to_string(block_tokens) + " tokens; they have one or more");
  }
  const BlockKey first = key_of(seed);
  const Tokens view(tokens);
  const std::span<const std::int64_t> all = view.all();
  const auto per_block = static_cast<std::size_t>(block_tokens);
  const std::size_t bytes = all.size() / per_block * BlockKey::kBytes;
  const auto keys =
      nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
  if (!keys.is_valid()) throw nb::python_error();
  const std::span<std::byte> out(reinterpret_cast<std::byte*>(PyBytes_AsString(keys.ptr())), bytes);
  constexpr std::size_t kLong = 1 << 16;  // takes about 0.1 ms
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
  m.def("block_keys", &keys_of_tokens, "tokens"_a, "block_tokens"_a, "seed"_a,
        "Compute the 16-byte keys of all whole blocks of `tokens` (a buffer of int64) and return "
        "them concatenated. A key stands for all tokens up to the end of its block. `seed` is the "
        "fingerprint of a namespace, or the key of the preceding block. The keys are not "
        "cryptographic: see vmm_csrc/pool/block_keys.h. Raises InvalidArgumentError.");
  nb::class_<FoundRecords>(m, "FoundRecords",
                           "Records read from existing files, to be added to an index; see "
                           "vmm_csrc/tiers/found_records.h. For one thread at a time.")
      .def(nb::init<>())
      .def("add", &add_entries, "entries"_a, "file_id"_a, "first_own"_a, "first_slot"_a,
           "record_bytes"_a, "whole_slots"_a,
           "Read the entries of one part of a file's table. Returns (empty, torn): the file's "
           "slots without an entry, and those whose entry is not valid. Releases the GIL.")
      .def("end_file", &FoundRecords::end_file,
           "Sort the records of a file once all its parts were added.",
           nb::call_guard<nb::gil_scoped_release>())
      .def("restore", &restore_found, "index"_a, "most"_a,
           "Add up to `most` records to the index, oldest first across the files. Returns (slots "
           "as uint32, keys, checksums and times as uint64, owners as uint32, refused slots). "
           "Releases the GIL.")
      .def_prop_ro("left", &FoundRecords::left, "The number of records that were not restored yet.")
      .def(
          "owners",
          [](const FoundRecords& found) {
            std::vector<nb::bytes> all;
            for (const FoundRecords::Owner& owner : found.owners()) {
              all.emplace_back(reinterpret_cast<const char*>(owner.data()), owner.size());
            }
            return all;
          },
          "The owners of the records, 40 bytes each: namespace, model, generation.");
  nb::class_<TierIndex>(m, "TierIndex",
                        "The keys of a tier, their slots, and the next record to displace; see "
                        "vmm_csrc/tiers/tier_index.h. Thread-safe.")
      .def(nb::new_(&make_index), "slots"_a, "policy"_a = "slru",
           "Create an index with `slots` slots. `policy` is the eviction policy: lru, lfu, slru or "
           "fifo. Raises InvalidArgumentError.")
      .def("has", &has, "keys"_a, "Return for each key whether it is ready. Changes nothing.")
      .def(
          "leading",
          [](const TierIndex& index, const nb::bytes& keys) {
            const TierIndex::Leading counts = index.leading(Keys(keys));
            return std::pair(counts.ready, counts.known);
          },
          "keys"_a,
          "Return (ready, known): how many leading keys are ready, and how many are ready or "
          "pending. Changes nothing.")
      .def(
          "match", [](TierIndex& index, const nb::bytes& keys) { return index.match(Keys(keys)); },
          "keys"_a, "Return how many leading keys are ready, and count this as a use of each.")
      .def("hold", &hold, "keys"_a,
           "Lease the leading ready keys until release(). Returns (ticket, slots). Counts as a use "
           "of these keys.")
      .def(
          "release",
          [](TierIndex& index, std::uint64_t ticket) {
            return list_of_records(unwrap(index.release(ticket)));
          },
          "ticket"_a,
          "End a hold. Returns (key, slot) of each record that was erased in the meantime and "
          "whose slot is free now. Raises InvalidArgumentError if the ticket is unknown or has "
          "ended.")
      .def("claim", &claim, "keys"_a, "chain_after"_a.none() = nb::none(),
           "Assign a slot to each new key, which is pending then. Returns (slots, displaced). A "
           "slot of -1 means that the key is already ready or pending; -2 means that no slot is "
           "available. `displaced` has (key, slot) of the records displaced by the call. With "
           "`chain_after`, each key continues the one before it, and the first continues that key "
           "(zeros: no parent). Raises InvalidArgumentError.")
      .def(
          "commit",
          [](TierIndex& index, const nb::bytes& keys) {
            return list_of_records(unwrap(index.commit(Keys(keys))));
          },
          "keys"_a,
          "Make written keys ready. Returns (key, slot) of the keys that are removed instead, "
          "because they were erased or lie above a smaller size. Raises InvalidArgumentError, with "
          "nothing changed, if a key is not pending.")
      .def(
          "abandon",
          [](TierIndex& index, const nb::bytes& keys) { check(index.abandon(Keys(keys))); },
          "keys"_a,
          "Remove pending keys that were not written, and free their slots. Raises "
          "InvalidArgumentError if a key is not pending.")
      .def(
          "slot_of",
          [](const TierIndex& index, const nb::bytes& key) { return index.slot_of(key_of(key)); },
          "key"_a, "Return the slot of a key, or -1 if the key is not ready.")
      .def(
          "erase",
          [](TierIndex& index, const nb::bytes& keys) {
            return list_of_records(index.erase(Keys(keys)));
          },
          "keys"_a,
          "Erase keys. Returns (key, slot) of those whose slots are free now. release() returns "
          "the held ones later, and commit() the pending ones.")
      .def(
          "restore",
          [](TierIndex& index, const nb::bytes& key, std::uint64_t slot,
             const std::optional<nb::bytes>& chain_after) {
            return unwrap(
                index.restore(key_of(key), slot, chain_after ? key_of(*chain_after) : BlockKey{}));
          },
          "key"_a, "slot"_a, "chain_after"_a.none() = nb::none(),
          "Add a record found in a slot as ready. Returns False if the key exists, or the slot is "
          "taken or does not exist. Raises InvalidArgumentError for the zero key.")
      .def(
          "resize",
          [](TierIndex& index, std::uint64_t slots) {
            return list_of_records(unwrap(without_gil([&] { return index.resize(slots); })));
          },
          "slots"_a,
          "Set the number of slots. Returns (key, slot) of the displaced records. Slots above the "
          "new size are not assigned again. release() returns held records above it later, and "
          "commit() pending ones.")
      .def(
          "displace",
          [](TierIndex& index, std::uint64_t count) {
            return list_of_records(without_gil([&] { return index.displace(count); }));
          },
          "count"_a,
          "Displace up to `count` records by the policy; their slots are free then. Returns (key, "
          "slot) of each. Held and pending records stay.")
      .def(
          "close",
          [](TierIndex& index, std::uint64_t first, std::uint64_t count) {
            return list_of(index.close(first, count));
          },
          "first"_a, "count"_a,
          "Close the free slots among `count` from `first` on, and return them. Only restore() "
          "uses closed slots.")
      .def(
          "close_by_policy",
          [](TierIndex& index, std::uint64_t count) {
            const TierIndex::Closed closed =
                without_gil([&] { return index.close_by_policy(count); });
            return std::pair(list_of(closed.slots), list_of_records(closed.displaced));
          },
          "count"_a,
          "Close up to `count` slots: free ones first, then those of records displaced by the "
          "policy. Returns (slots, displaced) as claim() does. Held and pending records stay.")
      .def(
          "open",
          [](TierIndex& index, const std::vector<std::int64_t>& slots) {
            check(index.open(slots));
          },
          "slots"_a,
          "Open closed slots. Raises InvalidArgumentError, with no slot opened, if a slot is not "
          "closed.")
      .def("stats", &stats, "Return the counts slots, ready, pending, closed, held and displaced.")
      .def(
          "check_integrity",
          [](const TierIndex& index) {
            check(without_gil([&] { return index.check_integrity(); }));
          },
          "Raise IntegrityError, naming the inconsistency, if the index is inconsistent.");
}

}  // namespace kvelastic
