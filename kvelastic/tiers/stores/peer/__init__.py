"""Blocks of another engine: a prefill engine holds and serves them, a decode engine reads them."""
