"""Tiny random models, one for each KV cache shape that stock vLLM 0.32 runs on its CPU backend, and
DeepSeek-V4's, for which it is mended (`mended_deepseek_v4`).

`write` puts the model, its tokenizer and its draft, if it has one, into a folder; `engine_args` is
what vLLM's `LLM` wants for it beside `tiny_model`'s usual arguments (float32, enforce_eager).
Run as a program: `tiny_architectures.py NAME FOLDER`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_adapter
import tiny_model

Config = Mapping[str, Any]
Weights = dict[str, Any]

WINDOW = 64
HIDDEN = 128
LLAMA: Config = {
    "vocab_size": tiny_model.VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
NO_PREFIX_CACHE: Config = {"enable_prefix_caching": False}
"""For Mamba2: its CPU kernel does not give the states within a prompt that prefix caching keeps."""

PLAIN_OPERATORS: Config = {"compilation_config": {"custom_ops": ["none"]}}
"""For MLA and LFM2: with vLLM's CPU operators, answers depend on what else is in the batch."""


@dataclass(frozen=True)
class Architecture:
    """One model: the cache shape it stands for, and what makes it."""

    name: str
    shape: str
    model_type: str
    config: Config = field(default_factory=dict)
    """Over LLAMA; None takes a key away, so that the architecture's own value holds."""
    args: Config = field(default_factory=dict)
    draft: Architecture | None = None
    change_weights: Callable[[Weights], Weights] | None = None
    has_weights: bool = True
    """False: vLLM makes them (`load_format="dummy"`), as transformers names them otherwise."""
    adapters: int = 0
    """Number of LoRA adapters, which requests use in turn.

    None uses the model alone: beside them vLLM 0.32 on a CPU computes it with the last adapter
    (`lora_ops.bgmv_shrink` indexes with -1).
    """

    def write(self, folder: str) -> None:
        import torch
        from safetensors.torch import load_file, save_file
        from transformers import AutoConfig, AutoModelForCausalLM

        tiny_model.write(folder)  # for its tokenizer; its model is written over
        values = {k: v for k, v in {**LLAMA, **self.config}.items() if v is not None}
        if not self.has_weights:
            Path(folder, "model.safetensors").unlink()
            described = {"model_type": self.model_type, **values}
            Path(folder, "config.json").write_text(json.dumps(described))
            return
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.model_type, **values)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        if self.change_weights is not None:
            file = Path(folder, "model.safetensors")
            save_file(self.change_weights(load_file(file)), file, metadata={"format": "pt"})
        if self.draft is not None:
            self.draft.write(self._draft_folder(folder))
        for number in range(1, self.adapters + 1):
            tiny_adapter.write(self.adapter_folder(folder, number), number)

    @staticmethod
    def adapter_folder(folder: str, number: int) -> str:
        return str(Path(folder, f"adapter{number}"))

    def engine_args(self, folder: str) -> dict[str, Any]:
        args = dict(self.args)
        if self.draft is not None:
            of_draft = {"model": self._draft_folder(folder)}
            args["speculative_config"] = {**args["speculative_config"], **of_draft}
        return args

    @staticmethod
    def _draft_folder(folder: str) -> str:
        return str(Path(folder, "draft"))


def _speculative(method: str, tokens: int, **more: object) -> Config:
    return {"speculative_config": {"method": method, "num_speculative_tokens": tokens, **more}}


def _layers(pattern: str) -> list[str]:
    names = {
        "s": "sliding_attention",
        "f": "full_attention",
        "k": "chunked_attention",
        "l": "linear_attention",
        "c": "conv",
        "m": "mamba",
        "a": "attention",
        "h": "hybrid",
    }
    return [names[letter] for letter in pattern]


def _small_random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * 0.1


def _as_eagle(weights: Weights) -> Weights:
    """One Llama layer as an EAGLE head: `fc` joins the token's embedding and the target's state."""
    kept = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    return {**kept, "fc.weight": _small_random(HIDDEN, 2 * HIDDEN)}


def _with_mtp_layer(weights: Weights) -> Weights:
    """A DeepSeek prediction layer behind the last one, which transformers does not write."""
    import torch

    last = f"model.layers.{LLAMA['num_hidden_layers']}."
    added = {
        name.replace("model.layers.0.", last): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{last}{norm}.weight"] = torch.ones(HIDDEN)
    added[f"{last}eh_proj.weight"] = _small_random(HIDDEN, 2 * HIDDEN)
    added[f"{last}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    added[f"{last}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return {**weights, **added}


def _loud_layers(weights: Weights) -> Weights:
    """Where the output head must be the embedding: else every token answers itself."""
    return {k: w.fill_(8.0) if "post_" in k else w for k, w in weights.items()}


_DEEPSEEK: Config = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # with the 64 below, the one size that the CPU kernel has
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 99,  # no experts, not in a prediction layer either
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
_DEEPSEEK_V4: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "compress_ratios": [0, 4, 128, 4],  # a window alone; with an indexer; without one
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 2048},
    "sliding_window": 2 * WINDOW,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,  # with the sizes below, what the CPU kernels have
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 0,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "expert_dtype": "fp8",
}
_MAMBA2: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
_GEMMA3: Config = {"sliding_window": WINDOW, "query_pre_attn_scalar": 32}
_GEMMA4: Config = {
    "sliding_window": WINDOW,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "vocab_size_per_layer_input": tiny_model.VOCABULARY,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "layer_types": _layers("sssf"),
}

ARCHITECTURES = {
    one.name: one
    for one in (
        Architecture(
            "mha", "one group; as many KV heads as heads", "llama", {"num_key_value_heads": 4}
        ),
        Architecture("gqa", "one group; two heads for one KV head", "llama"),
        Architecture("gqa_odd_blocks", "blocks of 48 KiB", "llama", args={"block_size": 96}),
        Architecture(
            "mla",
            "one latent of 576 for a token; blocks of 16 tokens",
            "deepseek_v3",
            _DEEPSEEK,
            PLAIN_OPERATORS,
        ),
        Architecture(
            "mla_alone",
            "as mla, a request at a time: its answers are exact in any type",
            "deepseek_v3",
            _DEEPSEEK,
            {**PLAIN_OPERATORS, "max_num_seqs": 1},
        ),
        Architecture(
            "sliding_window",
            "one group, all of sliding windows",
            "mistral",
            {"sliding_window": WINDOW},
        ),
        Architecture(
            "full_and_sliding",
            "two groups of two layers, full and sliding, sharing memory",
            "gemma2",
            {**_GEMMA3, "tie_word_embeddings": True, "layer_types": _layers("sfsf")},
            change_weights=_loud_layers,
        ),
        Architecture(
            "attention_sinks",
            "as full_and_sliding, with sinks and experts",
            "gpt_oss",
            {
                "sliding_window": WINDOW,
                "layer_types": _layers("sfsf"),
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        Architecture(
            "mostly_sliding",
            "four groups of one layer: three sliding, one full",
            "gemma3_text",
            {**_GEMMA3, "layer_types": _layers("sssf")},
        ),
        Architecture(
            "loud_mostly_sliding",
            "as mostly_sliding; its head is the embedding, as SGLang wants it",
            "gemma3_text",
            {**_GEMMA3, "tie_word_embeddings": True, "layer_types": _layers("sssf")},
            change_weights=_loud_layers,
        ),
        Architecture(
            "mixed_as_full",
            "one group of full and sliding layers: the hybrid manager is off",
            "gemma3_text",
            {**_GEMMA3, "layer_types": _layers("sssf")},
            {"disable_hybrid_kv_cache_manager": True},
        ),
        Architecture(
            "chunked",
            "four groups of one layer: three attend within chunks, one to all",
            "llama4_text",
            {
                "attention_chunk_size": WINDOW,
                "layer_types": _layers("kkkf"),
                "no_rope_layers": [1, 1, 1, 0],
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 256,
                "interleave_moe_layer_step": 2,
            },
            {"block_size": 32},  # chunks must hold whole blocks
        ),
        Architecture(
            "head_sizes",
            "groups of blocks of 64 and 32 tokens, to the same bytes",
            "gemma4_text",
            _GEMMA4,
            {"block_size": 32},
        ),
        Architecture(
            "head_sizes_by_three",
            "as head_sizes, by three: blocks of 96 and 32 tokens",
            "gemma4_text",
            {**_GEMMA4, "global_head_dim": 96},
            {"block_size": 32},
        ),
        Architecture(
            "head_sizes_in_one_group",
            "one group with two sizes of block",
            "gemma4_text",
            {**_GEMMA4, "global_head_dim": 96},
            {"block_size": 32, "disable_hybrid_kv_cache_manager": True},
        ),
        Architecture(
            "shared_layers",
            "the last three layers read the KV of others and have none",
            "gemma4_text",
            {
                **_GEMMA4,
                "hidden_size_per_layer_input": 32,
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 3,
                "layer_types": _layers("ssfssf"),
            },
        ),
        Architecture(
            "mamba2",
            "no attention; one state for a request",
            "mamba2",
            {
                "num_attention_heads": None,
                "num_key_value_heads": None,
                "num_heads": 8,
                "state_size": 32,
                "n_groups": 1,
                "expand": 2,
                "chunk_size": 32,
            },
        ),
        Architecture(
            "mamba2_and_attention",
            "two groups of two layers: attention and states, padded to one block's bytes",
            "granitemoehybrid",
            {
                **_MAMBA2,
                "head_dim": None,
                "layer_types": _layers("mama"),
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "shared_intermediate_size": HIDDEN,
            },
            NO_PREFIX_CACHE,
        ),
        Architecture(
            "mamba2_beside_attention",
            "attention and a state in each layer",
            "falcon_h1",
            {**_MAMBA2, "mamba_d_ssm": 256},
            NO_PREFIX_CACHE,
        ),
        Architecture(
            "mamba2_shared_attention",
            "states in each layer, one attention module used twice",
            "zamba2",
            {
                "head_dim": None,
                "num_key_value_heads": 4,
                "layers_block_type": _layers("mhmh"),
                "mamba_d_state": 32,
                "mamba_expand": 2,
                "mamba_ngroups": 1,
                "n_mamba_heads": 8,
                "chunk_size": 32,
                "num_mem_blocks": 1,
                "attention_hidden_size": 2 * HIDDEN,
                "attention_head_dim": 64,
                "adapter_rank": 8,
                "use_mem_rope": True,
            },
            NO_PREFIX_CACHE,
        ),
        Architecture(
            "mamba2_or_attention",
            "as mamba2_and_attention, without MLPs",
            "nemotron_h",
            {
                "hybrid_override_pattern": "M*M*",
                "mamba_num_heads": 8,
                "mamba_head_dim": 32,
                "n_groups": 1,
                "ssm_state_size": 32,
                "chunk_size": 32,
                "expand": 2,
            },
            NO_PREFIX_CACHE,
        ),
        Architecture(
            "gated_delta",
            "three groups of states with prefix caching, one of attention, in bfloat16",
            "qwen3_next",
            {
                "layer_types": _layers("lllf"),
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 128,  # the CPU kernel has no 32
                "linear_value_head_dim": 128,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
                "mlp_only_layers": [0, 1, 2],
            },
            {"dtype": "bfloat16"},  # all that the CPU kernel takes
        ),
        Architecture(
            "convolution_and_attention",
            "two groups of two layers, attention and states, with prefix caching",
            "lfm2",
            {
                "head_dim": None,
                "layer_types": _layers("cfcf"),
                "conv_L_cache": 3,
                "block_auto_adjust_ff_dim": False,
                # vLLM asks for these, and transformers' configuration has none of them.
                "conv_dim": HIDDEN,
                "block_dim": HIDDEN,
                "block_ff_dim": 256,
                "block_multiple_of": 256,
                "block_ffn_dim_multiplier": 1.0,
            },
            PLAIN_OPERATORS,
        ),
        Architecture(
            "fp8", "gqa with a KV cache of 8 bits", "llama", args={"kv_cache_dtype": "fp8"}
        ),
        Architecture(
            "deepseek_v4",
            "groups of windows, compressed latents and compressor states, with an indexer's keys",
            "deepseek_v4",
            _DEEPSEEK_V4,
            # One request at a time: what else is in the batch changes no answer in this type.
            {
                "load_format": "dummy",
                "dtype": "bfloat16",
                "max_num_seqs": 1,
                "tokenizer_mode": "hf",
            },
            has_weights=False,
        ),
        Architecture(
            "two_adapters",
            "gqa, with two LoRA adapters in a batch",
            "llama",
            args={"enable_lora": True, "max_loras": 2},
            adapters=2,
        ),
        Architecture(
            "ngram",
            "gqa with guesses taken from the prompt",
            "llama",
            args=_speculative("ngram", 3, prompt_lookup_max=3, prompt_lookup_min=1),
        ),
        Architecture(
            "draft_accepted",
            "gqa with itself as its draft: every guess holds",
            "llama",
            args=_speculative("draft_model", 3),
            draft=Architecture("draft", "gqa", "llama"),
        ),
        Architecture(
            "draft_refused",
            "gqa with a random draft whose blocks are half as big: every guess fails",
            "llama",
            args=_speculative("draft_model", 3),
            draft=Architecture(
                "draft", "mqa", "llama", {"num_hidden_layers": 1, "num_key_value_heads": 1}
            ),
        ),
        Architecture(
            "eagle",
            "gqa with a random EAGLE head",
            "llama",
            args=_speculative("eagle", 3),
            draft=Architecture(
                "draft", "gqa", "llama", {"num_hidden_layers": 1}, change_weights=_as_eagle
            ),
        ),
        Architecture(
            "mtp",
            "mla with a random prediction layer",
            "deepseek_v3",
            {**_DEEPSEEK, "num_nextn_predict_layers": 1},
            {**PLAIN_OPERATORS, **_speculative("mtp", 1)},
            change_weights=_with_mtp_layer,
        ),
    )
}

if __name__ == "__main__":
    ARCHITECTURES[sys.argv[1]].write(sys.argv[2])
