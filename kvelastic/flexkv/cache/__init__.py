"""Which blocks lie where, and which transfers follow from that."""
