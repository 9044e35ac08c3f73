"""Writes a tiny random Llama and its tokenizer: `tiny_model.py FOLDER [LAYERS KV_HEADS HEAD_DIM]`.

Large initial weights make its greedy answers vary with every token of the prompt, so wrong KV shows
in the answer. Run as a program: importing transformers takes seconds and warns.
"""

from __future__ import annotations

import sys

VOCABULARY = 512


def write(folder: str, layers: int = 4, kv_heads: int = 2, head_dim: int = 32) -> None:
    """vLLM's attention on the CPU takes no `head_dim` below 32."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="t1",
        eos_token="t2",
        pad_token="t0",
        unk_token="t0",
    ).save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1], *map(int, sys.argv[2:]))
