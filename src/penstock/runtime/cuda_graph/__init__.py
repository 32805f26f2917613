"""A whole training step as one launch: recorded once, and replayed for every step like it."""
