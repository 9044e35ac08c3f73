"""A tiny decoder with random weights, and what it computes for each slot of a batch.

Every step computes one token of each slot, prompts too, so all steps have one shape: a CUDA graph
replays them, and what a slot computes does not depend on who else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from benchmarks.vmm.models import Model

HIDDEN: Final = 128
VOCABULARY: Final = 2048

Layers = list[tuple[Any, Any]]
"""Keys and values of each layer, (ids, tokens, heads, dim)."""


class Decoder:
    """The weights: normalisation, attention over a paged cache and two linear layers, residual."""

    def __init__(self, model: Model, most_tokens: int, device: str, dtype: torch.dtype) -> None:
        """`dtype` is the cache's; the decoder itself computes in float32."""
        import torch

        generator = torch.Generator().manual_seed(7)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device)

        self._model, self._dtype = model, dtype
        self._heads = (model.query_heads, model.kv_heads, model.kv_heads)
        wide = sum(self._heads) * model.head_dim
        narrow = model.query_heads * model.head_dim
        self.embedding = random(VOCABULARY, HIDDEN)
        self._positions = random(most_tokens, HIDDEN)
        # The gains make attention heard beside the residual, and tokens differ from step to step.
        self._layers = [
            (
                random(HIDDEN, wide, scale=2 * HIDDEN**-0.5),
                random(narrow, HIDDEN, scale=4 * narrow**-0.5),
                random(HIDDEN, 2 * HIDDEN, scale=HIDDEN**-0.5),
                random(2 * HIDDEN, HIDDEN, scale=HIDDEN**-0.5),
            )
            for _ in range(model.layers)
        ]

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: Layers,
        table: torch.Tensor,
        attention: Any,
    ) -> torch.Tensor:
        """(slots, HIDDEN) for a token a slot; its K and V are in the cache then."""
        import torch

        dim = self._model.head_dim
        lengths = (positions + 1).int()
        state = self.embedding[tokens] + self._positions[positions]
        for (qkv, out, up, down), (keys, values) in zip(self._layers, cache, strict=True):
            made = (_normalised(state) @ qkv).to(self._dtype).unflatten(1, (-1, dim))
            query, key, value = (each.contiguous() for each in made.split(self._heads, dim=1))
            attention.store(key, value, keys, values, table, lengths)
            answer = attention.attend(query, keys, values, table, lengths)
            state = state + answer.float().flatten(1) @ out
            state = state + torch.relu(_normalised(state) @ up) @ down
        return _normalised(state)


def _normalised(state: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.layer_norm(state, state.shape[-1:])


class Trajectory:
    """One decoder over one cache: every sequence's tokens so far, each chosen greedily.

    The log has a row a sequence, with its prompt at first, and one row more for slots with none.
    """

    def __init__(self, decoder: Decoder, cache: Layers, attention: Any, log: torch.Tensor) -> None:
        self._decoder, self._cache, self._attention = decoder, cache, attention
        self.log = log.clone()

    def step(self, rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The next token of each slot, into the log; answers the state that it was chosen by.

        `rows` are (slots, 4): row of the log, position, tokens of the prompt, whether it counts.
        """
        import torch

        row, position, prompt, _ = rows.unbind(1)
        hidden = self._decoder.hidden(
            self.log[row, position], position, self._cache, table, self._attention
        )
        chosen = (hidden @ self._decoder.embedding.T).argmax(1)
        after = position + 1
        self.log[row, after] = torch.where(after < prompt, self.log[row, after], chosen)
        return hidden
