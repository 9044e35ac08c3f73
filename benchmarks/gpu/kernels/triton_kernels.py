"""The Triton kernels: attention of one query token a request over blocks, in splits of its tokens.

A block's K is at `keys + id * block_step + token * token_step + head * head_step`, and V lies at
the same offset of `values`. Offsets are 64 bits wide: ids reach far into a range.

    request r, 10 tokens, blocks of 4     table[r]  [ 7 ][ 2 ][ 9 ][ - ]     columns
    tiles of 4, two splits                split 0: tokens 0..7, split 1: tokens 8..9

Use `PagedAttention`. Annotations are real objects here, since Triton looks at them.
"""

import triton
import triton.language as tl


@triton.jit
def attend_splits(
    query,
    keys,
    values,
    table,
    lengths,
    partial,
    partial_lse,
    scale,
    block_step,
    token_step,
    head_step,
    table_columns,
    splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    READ_AHEAD: tl.constexpr,
):
    """One program: the `GROUP` query heads of one KV head, over one split of one request.

    Leaves the split's own softmax and its log-sum-exp for `merge_splits`. `ROWS` is GROUP, padded
    to what a matrix multiplication takes. With `READ_AHEAD` it reads whole tiles, as kernels do
    that trust the columns behind a request's last block, and drops what is too much afterwards.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + request)
    split_tokens = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, length)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    # Row of (request, query head) in query and in the partial results.
    row = (request * tl.num_programs(1) + head) * GROUP + rows
    in_group = rows < GROUP
    q = tl.load(query + row[:, None] * DIM + dims[None, :], mask=in_group[:, None], other=0.0)

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    answer = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < end
        column = token // TOKENS
        read = column < table_columns if READ_AHEAD else inside
        block = tl.load(table + request * table_columns + column, mask=read, other=0).to(tl.int64)
        at = block * block_step + (token % TOKENS) * token_step + head * head_step
        k = tl.load(keys + at[:, None] + dims[None, :], mask=read[:, None], other=0.0)
        v = tl.load(values + at[:, None] + dims[None, :], mask=read[:, None], other=0.0)
        if READ_AHEAD:
            v = tl.where(inside[:, None], v, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        answer = answer * shrink[:, None]
        answer += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher

    out = row * splits + split
    # An empty split: a total of 0, and a log-sum-exp of minus infinity, which weighs nothing.
    answer = answer / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(partial + out[:, None] * DIM + dims[None, :], answer, mask=in_group[:, None])
    tl.store(partial_lse + out, highest + tl.log(total), mask=in_group)


@triton.jit
def merge_splits(
    partial,
    partial_lse,
    answer,
    splits,
    DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """One program: the splits of one (request, query head), put together."""
    row = tl.program_id(0)
    dims = tl.arange(0, DIM)
    split = tl.arange(0, MOST_SPLITS)
    there = split < splits
    lse = tl.load(partial_lse + row * splits + split, mask=there, other=float("-inf"))
    highest = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    parts = tl.load(
        partial + (row * splits + split)[:, None] * DIM + dims[None, :],
        mask=there[:, None],
        other=0.0,
    )
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(answer + row * DIM + dims, merged.to(answer.dtype.element_ty))


@triton.jit
def store_tokens(
    new_keys,
    new_values,
    keys,
    values,
    table,
    lengths,
    block_step,
    token_step,
    head_step,
    table_columns,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program: K and V of one head of each request's last token, into its block."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM)
    token = tl.load(lengths + request) - 1
    block = tl.load(table + request * table_columns + token // TOKENS).to(tl.int64)
    at = block * block_step + (token % TOKENS) * token_step + head * head_step
    new = (request * tl.num_programs(1) + head) * DIM + dims
    tl.store(keys + at + dims, tl.load(new_keys + new))
    tl.store(values + at + dims, tl.load(new_values + new))
