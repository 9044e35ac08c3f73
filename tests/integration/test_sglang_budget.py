"""What SGLang's prefill may admit where a prompt that has begun has to wait."""

from __future__ import annotations

import needs
import pytest
from sglang_server import run_in_sglang

pytestmark = [pytest.mark.slow, needs.sglang, pytest.mark.timeout(300)]

PROGRAM = """
from types import SimpleNamespace as Made
from kvelastic.integration.sglang.allocator import ElasticPrefillBudget

there = {"tokens": 64}
allocator = Made(page_size=32, reachable_size=lambda tree: there["tokens"],
                 have=lambda tokens, tree: tokens <= there["tokens"])

def small(budget):
    fits, _ = budget.check_prefill(extend_input_len=20, total_tokens=30, max_new_tokens=10,
                                   input_tokens=20, swa_host_hit_length=0, chunk_limit=None)
    return fits, budget.can_allocate_prefill(paged_input=32, extend_input_len=20,
                                             max_new_tokens=10, chunk_limit=None)

def chunk(budget, left):
    return budget.fit_chunk(extend_input_len=left, max_new_tokens=10,
                            chunk_limit=budget.available_chunk_tokens(128))

print([chunk(ElasticPrefillBudget(allocator, None), left) for left in (20, 33, 64, 65, 500)])
print(small(ElasticPrefillBudget(allocator, None)))
there["tokens"] = 31
budget = ElasticPrefillBudget(allocator, None)
print(chunk(budget, 100))
there["tokens"] = 1024
print(small(budget))
budget = ElasticPrefillBudget(allocator, None)
print(chunk(budget, 500), small(budget))

def large(budget):
    return budget.check_prefill(extend_input_len=900, total_tokens=1200, max_new_tokens=268,
                                input_tokens=1000, swa_host_hit_length=0, chunk_limit=None)

budget = ElasticPrefillBudget(allocator, None)
print(budget.short_blocks, large(budget), budget.short_blocks, large(budget), budget.short_blocks)

from kvelastic.integration.sglang import in_scheduler
said = []
allocator.waiting = Made(report=lambda count, first_blocks=0: said.append((count, first_blocks)))
scheduler = Made(waiting_queue=[1, 2], chunked_req=None)
for allocator.prefill_budget in (budget, None, ElasticPrefillBudget(allocator, None)):
    in_scheduler._report_waiting(allocator, scheduler)
scheduler.waiting_queue = []
in_scheduler._report_waiting(allocator, scheduler)
print(said)
"""


@pytest.mark.matrix
def test_waiting_chunked_prompt_blocks_later_admissions() -> None:
    """Else SGLang drops the first token of its answer: it counts chunks by the batches it makes."""
    chunks, alone, waits, behind, the_next_round, *_ = run_in_sglang(PROGRAM, 7)
    assert chunks == "[20, 33, 64, 64, 64]", "as much as there is, and no more than is left"
    assert alone == "(True, True)"
    assert (waits, behind) == ("None", "(False, False)")
    assert the_next_round == "128 (True, True)"


@pytest.mark.matrix
def test_first_request_without_memory_reports_its_need() -> None:
    *_, found, said = run_in_sglang(PROGRAM, 7)
    # 100 tokens of a prefix, and the 1200 of which SGLang wants more than are left, in blocks of 32
    assert found == "None (False, None) 41 (False, None) 41"
    assert said == "[(2, 41), (0, 0), (0, 0)]", "nothing is said of rounds without a look"
