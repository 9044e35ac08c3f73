"""What processes share: segments, ledgers, liveness, status files."""
