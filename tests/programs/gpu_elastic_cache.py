"""`ElasticCache` over the simulated GPU: prints what happened as JSON, and then is killed.

The processor computes; everything below the tensors is what runs on a GPU. One seam: how a range
becomes a tensor.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any


def main() -> None:
    import torch
    import transformers
    from simulated_gpu import seams

    from kvelastic.integration.transformers import ElasticCache, token_store
    from kvelastic.shared import segment

    token_store.whole_range = seams.whole_range
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 512, (4, 300))
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 16,
        "do_sample": False,
    }
    expected = model.generate(ids, **settings)
    found: dict[str, Any] = {"equal": []}
    cache = ElasticCache(config, device="cuda")
    for _ in range(2):
        got = model.generate(ids, past_key_values=cache, **settings)
        found["equal"].append(bool(torch.equal(got, expected)))
        found["mapped_bytes"] = segment.inspect(cache.name).usage["mapped_bytes"]
        found["device"] = segment.inspect(cache.name).header["device"]
        cache.check_integrity()
        cache.reset()
        found["bytes_after_reset"] = segment.inspect(cache.name).usage["mapped_bytes"]
    model.generate(ids, past_key_values=cache, **settings)
    print(json.dumps(found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
