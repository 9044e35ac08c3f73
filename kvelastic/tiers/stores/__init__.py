"""Stores: where evicted blocks are kept, each kind behind `tiers.base.Store`."""
