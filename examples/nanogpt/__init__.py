"""A small GPT and its training loop in the manner of nanoGPT: docs/recipes/generation.md.

python -m nanogpt.train             the unsplit model
python -m nanogpt.train_pipe        the same script with three lines changed
"""
