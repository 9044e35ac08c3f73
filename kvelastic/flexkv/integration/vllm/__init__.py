"""vLLM's own FlexKVConnectorV1, on the alias."""
