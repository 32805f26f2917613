"""Failure detection among the ranks of a pipe. ../README.md shows what happens on a fault."""
