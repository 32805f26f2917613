"""One stage on one device: it computes one micro-batch at a time, and knows no ranks."""
