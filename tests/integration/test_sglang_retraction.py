"""Which of SGLang's running requests a limit retracts, and that the others stay in the batch."""

from __future__ import annotations

import needs
import pytest
from sglang_server import run_in_sglang

pytestmark = [pytest.mark.slow, needs.sglang, pytest.mark.timeout(300)]

PROGRAM = """
from types import SimpleNamespace as Made
import torch
from kvelastic.integration.sglang import in_scheduler, retraction
from kvelastic.integration.sglang.allocator import ElasticPagedAllocator
from kvelastic.pool.scheduling.over_limit import NOTHING, choose_requests

PAGE_TOKENS = 32
BLOCKS_A_PAGE = 4
rows = torch.zeros((8, 512), dtype=torch.int64)

class Request:
    beam_group = None
    def __init__(self, name, row, blocks, tokens):
        self.name = name
        self.kv = Made(holds_kv=True, req_pool_idx=row, kv_committed_len=tokens,
                       kv_allocated_len=len(blocks) * PAGE_TOKENS)
        for at, block in enumerate(blocks):
            first = block * PAGE_TOKENS
            rows[row, at * PAGE_TOKENS:(at + 1) * PAGE_TOKENS] = torch.arange(
                first, first + PAGE_TOKENS)
        self.output_ids = [1]
        self.sampling_params = Made(max_new_tokens=10)
    def finished(self):
        return False
    def __repr__(self):
        return self.name

class Batch:
    def __init__(self, allocator, *reqs, extend=False):
        self.reqs = list(reqs)
        self.released = []
        self.token_to_kv_pool_allocator = allocator
        self.forward_mode = Made(is_extend=lambda: extend)
    def check_decode_mem(self):
        return ElasticPagedAllocator.check_decode_capacity(
            self.token_to_kv_pool_allocator, num_tokens=1, tree_cache=None, requests=self.reqs)
    def release_req(self, index, left):
        self.released.append(self.reqs[index])
        return True
    def filter_batch(self, keep_indices):
        self.reqs = [self.reqs[index] for index in keep_indices]
    def is_empty(self):
        return not self.reqs

def stock(batch):
    last = batch.reqs.pop()
    return [last], 0.5, []

class OverLimit:
    excess = 0
    def choose(self, read_holders):
        if not self.excess:
            return NOTHING
        holders = read_holders()
        used = {}
        for block in set().union(*(holder.blocks for holder in holders)):
            used[block // BLOCKS_A_PAGE] = used.get(block // BLOCKS_A_PAGE, 0) + 1
        return choose_requests(self.excess, used, (), holders, lambda b: b // BLOCKS_A_PAGE)

allocator = Made(page_size=PAGE_TOKENS, over_limit=OverLimit(), to_retract=(),
                 evict_to_free_tokens=lambda tree, tokens: None,
                 blocks=Made(prepare=lambda pages: pages))
a = Request("a", 1, [4, 8], 50)      # on pages 1 and 2
b = Request("b", 2, [5, 9, 12], 90)  # on pages 1, 2 and 3
c = Request("c", 3, [16], 30)        # on page 4
d = Request("d", 4, [20], 10)        # on page 5, computed in chunks
e = Request("e", 5, [24], 20)        # on page 6, of the last prefill
scheduler = Made(req_to_token_pool=Made(req_to_token=rows), chunked_req=d)

def round_of(excess):
    allocator.over_limit.excess = excess
    running = Batch(allocator, a, b, c)
    last = Batch(allocator, d, e, extend=True)
    choice = retraction.choose(allocator, scheduler, running, last)
    merged = Batch(allocator, *running.reqs, *last.reqs)
    if merged.check_decode_mem():
        return choice.is_enough, "nobody"
    gone, _, aborted = in_scheduler.retract_decode(stock, merged)
    assert not aborted and merged.released == gone
    assert allocator.to_retract == ()
    return choice.is_enough, sorted(map(repr, gone)), merged.reqs

for excess in (0, 1, 2, 3, 9):
    print(round_of(excess))
allocator.over_limit.excess = 1
batch = Batch(allocator, a, c)
retraction.choose(allocator, scheduler, batch, None)
allocator.blocks = Made(prepare=lambda pages: 0)
print(in_scheduler.retract_decode(stock, batch)[0])
"""


@pytest.mark.matrix
def test_limit_retracts_requests_with_least_progress() -> None:
    nobody, one, two, three, too_many, more = run_in_sglang(PROGRAM, 6)
    assert nobody == "(False, 'nobody')"
    assert one == "(True, ['e'], [a, b, c, d])", "of the last prefill, and the cheapest"
    assert two == "(True, ['c', 'e'], [a, b, d])"
    assert three == "(True, ['b', 'c', 'e'], [a, d])", "page 3 has a block of b alone"
    assert too_many.startswith("(False, ['a', 'b', 'c', 'e'], [d])"), "a chunked prompt stays"
    assert more == "[c, a]", "there was no memory for the rest: stock goes on"
