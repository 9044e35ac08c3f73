"""KV that survives: demoted blocks, the stores that keep them, and what brings them back."""
