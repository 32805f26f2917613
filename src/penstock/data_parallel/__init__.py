"""Gradients after the backwards: reduced over replicas, clipped, checked for overflow.

README.md explains the modules.
"""
