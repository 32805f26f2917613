"""Checkpoints: what a pipe writes to disk, and reads from it, under the unsplit model's names."""
