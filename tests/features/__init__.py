"""Run every feature under every schedule, compare it, and write the result into the docs."""
