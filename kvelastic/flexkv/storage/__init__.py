"""Where blocks lie."""
