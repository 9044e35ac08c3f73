"""KV that survives: what the index, the stores and the copies of the tiers cost."""
