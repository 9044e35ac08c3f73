"""FlexKV's interface over kvelastic's tiers: a tiered KV cache for an engine without a plugin."""
