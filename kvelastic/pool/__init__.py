"""The pool of one model: layout, native pool, tensors, scheduling helpers for engines."""
