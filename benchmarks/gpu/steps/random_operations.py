"""Random operations of a range and of a pool over it; every byte that must be there is read back.

The range: map, unmap, destroy, copy of blocks. The pool: alloc, free, cache, limits, trims, sleep
and compaction; a block in use or cached holds its mark wherever it was moved.
"""

from __future__ import annotations

import random

from battery import Contents, geometry, whole_pool

from benchmarks.gpu.findings import Findings
from kvelastic import _vmm

PAGES = 24
MARK_BYTES = 16


def main() -> None:
    with Findings.of_command(__doc__) as found:
        seeds, steps = (2, 150) if found.quick else (6, 600)
        driver = _vmm.CudaDriver("cuda")
        driver.use_streams([])
        for seed in range(seeds):
            for extents in (1, 3):
                chance = random.Random(f"{seed} {extents}")
                for name, work in (("range", _range), ("pool", _pool)):
                    wrong = work(driver, chance, extents, steps)
                    found.check(
                        f"{name}, seed {seed}, {extents} extents a page: {steps} operations",
                        not wrong,
                        wrong,
                    )
        made = driver.stats()
        found.check("no page is left", made["creates"] == made["destroys"], str(made))


def _mark(value: int) -> bytes:
    return value.to_bytes(8, "little") * (MARK_BYTES // 8)


def _places(shape: _vmm.Geometry, base: int, block: int) -> list[int]:
    """Where a block begins in each extent."""
    page, within = divmod(block, shape.blocks_per_page)
    first = base + page * shape.extent_bytes + within * shape.block_bytes
    return [first + i * shape.extent_stride_bytes for i in range(shape.extents_per_page)]


def _write(contents: Contents, shape: _vmm.Geometry, base: int, block: int, value: int) -> None:
    for at in _places(shape, base, block):
        contents.write(at, _mark(value))
        contents.write(at + shape.block_bytes - MARK_BYTES, _mark(value))


def _holds(contents: Contents, shape: _vmm.Geometry, base: int, block: int, value: int) -> bool:
    return all(
        contents.read(place, MARK_BYTES) == _mark(value)
        for at in _places(shape, base, block)
        for place in (at, at + shape.block_bytes - MARK_BYTES)
    )


def _range(driver: _vmm.CudaDriver, chance: random.Random, extents: int, steps: int) -> str:
    shape = geometry(driver, PAGES, extents)
    memory, contents = _vmm.Range.reserve(driver, shape), Contents(driver)
    held: dict[int, int] = {}  # block -> what it was marked with
    mapped: set[int] = set()
    for step in range(steps):
        verb = chance.choice(("map", "unmap", "destroy", "write", "copy", "look"))
        blocks = [
            page * shape.blocks_per_page + i
            for page in mapped
            for i in range(shape.blocks_per_page)
            if page + i > 0  # not the null block
        ]
        if verb == "map":
            more = chance.sample(sorted(set(range(PAGES)) - mapped), min(3, PAGES - len(mapped)))
            memory.map(more)
            mapped |= set(more)
        elif verb in ("unmap", "destroy") and mapped:
            gone = chance.sample(sorted(mapped), min(2, len(mapped)))
            memory.unmap(gone, destroy=verb == "destroy")
            mapped -= set(gone)
            held = {b: v for b, v in held.items() if b // shape.blocks_per_page not in gone}
        elif verb == "write" and blocks:
            block = chance.choice(blocks)
            _write(contents, shape, memory.address, block, step)
            held[block] = step
        elif verb == "copy" and held and blocks:
            source, target = chance.choice(sorted(held)), chance.choice(blocks)
            if source != target:
                memory.copy([source], [target])
                held[target] = held[source]
        for block in chance.sample(sorted(held), min(4, len(held))):
            if not _holds(contents, shape, memory.address, block, held[block]):
                return f"after {step} operations block {block} has lost its contents"
        memory.check_integrity()
    memory.unmap(sorted(mapped), destroy=True)
    memory.trim()
    return ""


def _pool(driver: _vmm.CudaDriver, chance: random.Random, extents: int, steps: int) -> str:
    shape = geometry(driver, PAGES, extents)
    memory, contents = _vmm.Range.reserve(driver, shape), Contents(driver)
    pool = whole_pool(memory, movable=True)
    used: dict[int, int] = {}
    cached: dict[int, int] = {}
    whole = shape.pages * shape.page_bytes

    def take_changes() -> None:
        for block, to in pool.take_changes():
            for each in (used, cached):
                if block in each:
                    value = each.pop(block)
                    if to >= 0:
                        each[to] = value

    for step in range(steps):
        verb = chance.choice(
            ("alloc", "alloc", "free", "cache", "limit", "trim", "compact", "drop")
        )
        if verb == "alloc":
            ids = pool.alloc(chance.randint(1, 20)) or []
            take_changes()
            for block in ids:
                _write(contents, shape, memory.address, block, step)
                used[block] = step
        elif verb in ("free", "cache") and used:
            some = chance.sample(sorted(used), chance.randint(1, min(12, len(used))))
            values = {block: used.pop(block) for block in some}
            if verb == "cache":
                cached |= values
                pool.cache(some)
            else:
                pool.free(some)
        elif verb == "limit":
            pool.set_limit(chance.randint(2, PAGES) * shape.page_bytes)
        elif verb == "trim":
            pool.trim()
        elif verb == "compact":
            pool.compact()
        elif verb == "drop":
            pool.set_limit(whole)
        take_changes()
        both = used | cached
        for block in chance.sample(sorted(both), min(4, len(both))):
            if not _holds(contents, shape, memory.address, block, both[block]):
                return f"after {step} operations block {block} has lost its contents"
        pool.check_integrity()
    pool.clear()
    pool.take_changes()
    pool.close(discard=True)
    return ""


if __name__ == "__main__":
    main()
