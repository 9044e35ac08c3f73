"""Two vLLM of different tensor parallel sizes: each computes prompts that the other one decodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import needs
import pytest
from engine_server import DECIDED
from prefill_decode_servers import Answer, RoleServer, wait_until_blocks_move
from vllm_server import BLOCK_TOKENS, make_requests

pytestmark = pytest.mark.timeout(900)

PROGRAMS = Path(__file__).parents[1] / "programs"
BOUND = "0|1"
"""One core for each rank: without it vLLM wants a NUMA node for each."""
REQUESTS = [one._replace(max_tokens=8) for one in make_requests(24, seed=45, shortest=200)[::2]]
"""No two begin with the same tokens."""
COMPARED = 2
"""Requests for each direction: those whose tokens are decided longest."""


class Model(NamedTuple):
    program: list[str]
    """What writes it, but for the folder."""
    further: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    margin: float = DECIDED
    """Sums over ranks differ: a token is compared if its log probability leads by this much."""


MODELS = {
    "a_head_for_each_rank": Model(["tiny_model.py"], ("4", "2")),
    "one_head_on_both_ranks": Model(["tiny_model.py"], ("4", "1")),
    "mla": Model(
        ["tiny_architectures.py", "mla"],
        arguments=(
            *("--dtype", "bfloat16"),
            *("--compilation-config", '{"custom_ops": ["none"]}'),
        ),
        margin=0.25,
    ),
}


class Engines(NamedTuple):
    two: RoleServer
    one: RoleServer
    model: Model


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=needs.amx if name == "mla" else ()) for name in MODELS],
)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """An engine of two ranks, and one of one rank; both have both roles."""
    model = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    written = str(folder / "model")
    command = [sys.executable, *model.program, written, *model.further]
    subprocess.run(command, check=True, cwd=PROGRAMS)
    both = {"KVELASTIC_ROLE": "both"}
    ranks = ["--tensor-parallel-size", "2", *model.arguments]
    with (
        RoleServer(
            "prefill",
            folder / "model",
            folder / "two.log",
            ranks,
            VLLM_CPU_OMP_THREADS_BIND=BOUND,
            **both,
        ) as two,
        RoleServer("decode", folder / "model", folder / "one.log", model.arguments, **both) as one,
    ):
        for each in (two, one):
            each.wait_until_ready()
        wait_until_blocks_move(two, one)
        wait_until_blocks_move(one, two)
        yield Engines(two, one, model)


@pytest.mark.parametrize("ranks", ["two_to_one", "one_to_two"])
def test_other_ranks_decode_a_prompt(ranks: str, engines: Engines) -> None:
    owner, reader = engines.two, engines.one
    if ranks == "one_to_two":
        owner, reader = reader, owner
    prompts = REQUESTS[ranks == "one_to_two" :: 2]  # the others were computed by the reader
    decided = [owner.decided(prompt, engines.model.margin) for prompt in prompts]
    longest = sorted(decided, key=lambda request: request.max_tokens)[-COMPARED:]
    assert longest[0].max_tokens > 0
    for request in longest:
        answer = reader.decode(request, owner.prefill(request))
        assert answer == Answer(owner.complete(request), len(request.prompt) // BLOCK_TOKENS)
