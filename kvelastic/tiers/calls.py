"""What one operation of a graph calls: the pool's copies, or a store. No lock is held."""

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
    """Do it for `items`; answers those for which it went well. Blocks.

    `store` is that of the operation's tier, None for a copy of the pool. Raises what that raises.
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
