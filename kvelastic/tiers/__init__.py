"""Tiers for KV cache blocks: demotion to stores, lookup, and loading back to the device."""
