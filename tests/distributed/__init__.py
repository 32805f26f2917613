"""Tests over several processes, and the processes that they run in."""
