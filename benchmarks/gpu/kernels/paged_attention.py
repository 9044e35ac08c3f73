"""Attention of a decode step over a paged cache: by Triton, or in torch's own operations.

    attention = PagedAttention(requests=16, model=model, splits=4, device="cuda")
    answer = attention.attend(query, keys, values, table, lengths)

query    (requests, query heads, dim), dense
keys     (ids, tokens of a block, heads, dim), any stride between ids; values as keys
table    (requests, columns) int32, dense: the ids of a request's blocks, in order
lengths  (requests,) int32: tokens of a request, at least 1; its last one is the query's own

`EagerAttention` has the same calls. Both may be used in a CUDA graph: no address changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from benchmarks.vmm.models import Model

TILE: Final = 64
"""Tokens that a program reads at once."""
LEAST_ROWS: Final = 16
"""Of a matrix that tensor cores multiply."""


def splits_for(requests: int, kv_heads: int, tokens: int, processors: int) -> int:
    """So many splits of a request that each of a GPU's processors has two programs."""
    splits = 1
    while requests * kv_heads * splits < 2 * processors and 2 * splits * TILE <= tokens:
        splits *= 2
    return splits


class PagedAttention:
    """The Triton kernels, and the memory for what splits leave."""

    def __init__(
        self, *, requests: int, model: Model, splits: int, device: str, read_ahead: bool = False
    ) -> None:
        """With `read_ahead` the variant that reads columns behind a request's last block."""
        import torch

        rows = requests * model.query_heads
        self._requests = requests
        self._model = model
        self._splits = splits
        self._read_ahead = read_ahead
        self._partial = torch.empty((rows, splits, model.head_dim), device=device)
        self._partial_lse = torch.empty((rows, splits), device=device)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """The answer, shaped as the query."""
        import torch

        from benchmarks.gpu.kernels import triton_kernels as kernels

        model, dim = self._model, self._model.head_dim
        _check_shapes(model, self._requests, query, keys, values, table)
        answer = torch.empty_like(query)
        group = model.query_heads // model.kv_heads
        kernels.attend_splits[(self._requests, model.kv_heads, self._splits)](
            query,
            keys,
            values,
            table,
            lengths,
            self._partial,
            self._partial_lse,
            dim**-0.5,
            *keys.stride()[:3],
            table.shape[1],
            self._splits,
            GROUP=group,
            ROWS=max(LEAST_ROWS, _power_of_two(group)),
            TOKENS=model.tokens_per_block,
            DIM=dim,
            TILE=TILE,
            READ_AHEAD=self._read_ahead,
        )
        kernels.merge_splits[(self._requests * model.query_heads,)](
            self._partial,
            self._partial_lse,
            answer,
            self._splits,
            DIM=dim,
            MOST_SPLITS=_power_of_two(self._splits),
        )
        return answer

    def store(
        self,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """Write K and V (requests, heads, dim) of each request's last token into its block."""
        from benchmarks.gpu.kernels import triton_kernels as kernels

        model = self._model
        kernels.store_tokens[(self._requests, model.kv_heads)](
            new_keys,
            new_values,
            keys,
            values,
            table,
            lengths,
            *keys.stride()[:3],
            table.shape[1],
            TOKENS=model.tokens_per_block,
            DIM=model.head_dim,
        )


class EagerAttention:
    """The same in torch. It gathers all columns of a table, so each must name a mapped block, and
    what lies behind a request's tokens must be finite: it is multiplied with 0.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        import torch

        ids = table.long()
        tokens = ids.shape[1] * keys.shape[1]
        inside = torch.arange(tokens, device=query.device)[None, :] < lengths[:, None]
        k, v = (buffer[ids].flatten(1, 2).transpose(1, 2) for buffer in (keys, values))
        answer = torch.nn.functional.scaled_dot_product_attention(
            query.unsqueeze(2), k, v, attn_mask=inside[:, None, None, :], enable_gqa=True
        )
        return answer.squeeze(2)

    def store(
        self,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        token = (lengths - 1).long()
        tokens = self._model.tokens_per_block
        block = table.long().gather(1, (token // tokens)[:, None]).squeeze(1)
        keys[block, token % tokens] = new_keys
        values[block, token % tokens] = new_values


def relative_error(answer: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the difference by that of the right answer; not a number where one is not."""
    return float((answer.float() - right.float()).norm() / right.float().norm())


def _check_shapes(
    model: Model,
    requests: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
) -> None:
    assert query.shape == (requests, model.query_heads, model.head_dim)
    assert keys.shape[1:] == model.block_shape
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1
    assert query.is_contiguous()
    assert table.is_contiguous()


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
