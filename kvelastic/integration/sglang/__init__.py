"""kvelastic for SGLang."""
