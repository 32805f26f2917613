"""A whole training step as one CUDA graph: captured once, and replayed for every step like it."""
