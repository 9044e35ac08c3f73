"""Runs one operation of a graph, by calls to the pool's copies or to a store, without a lock."""

from __future__ import annotations

from kvelastic.tiers.base import Store
from kvelastic.tiers.graph import Kind, Operation
from kvelastic.tiers.pool_side import Copies, StagingMemory
from kvelastic.tiers.run import Batch, Run


def carry_out(
    copies: Copies,
    memory: StagingMemory,
    store: Store | None,
    run: Run,
    operation: Operation,
    items: list[int],
    batch: Batch,
) -> list[int]:
    """Run the operation for `items`. Returns the items for which it succeeded. Blocks.

    `store` is the store of the operation's tier, or None for a copy of the pool. Raises the errors
    of the store or the copy.
    """
    transfer = run.transfer
    slots = [batch.slots[item] for item in items] if batch.slots else []
    if operation.kind is Kind.COPY_IN:
        copies.copy_in(memory, slots, [transfer.ids[item] for item in items])
        return items
    if operation.kind is Kind.COPY_OUT:
        copies.copy_out([transfer.ids[item] for item in items], memory, slots)
        if transfer.confirm is None:
            return items
        stood_still = transfer.confirm()
        return [item for item in items if stood_still[item]]
    assert store is not None
    if operation.kind is Kind.DROP:
        store.erase(transfer.keys_of(items))
        return items
    if operation.kind is Kind.GET:
        views = [memory.view(slot) for slot in slots]
        whole = store.get(transfer.keys_of(items), views)
        return [item for item, is_whole in zip(items, whole, strict=True) if is_whole]
    stored: list[int] = []
    for chain, parent in run.chains(items):
        views = [memory.view(batch.slots[item]) for item in chain]
        taken = store.put(transfer.keys_of(chain), views, chain_after=parent)
        stored += [item for item, is_taken in zip(chain, taken, strict=True) if is_taken]
    return stored
