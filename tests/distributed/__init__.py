"""Tests of pipes over several processes, and the worker processes they run in."""
