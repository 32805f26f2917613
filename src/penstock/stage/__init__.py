"""One stage on one device. It computes one micro-batch at a time and does not know about ranks."""
