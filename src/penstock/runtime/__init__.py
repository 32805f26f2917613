"""Run a pipe: from one call of `pipe(x)` or `pipe.step(x)` to actions on every rank.

README.md follows one step through the modules of this folder.
"""
