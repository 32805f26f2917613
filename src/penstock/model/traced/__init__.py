"""A small compiler that cuts any `nn.Module` into stages. See README.md in this folder.

Each stage runs the model's own forward, but executes only its part of it.
"""
