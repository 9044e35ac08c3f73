"""kvcached's interface in one process."""
