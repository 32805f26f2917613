"""Checkpoints: save, load and export a model under its unsplit names. See README.md."""
