"""Exempt what a fork server has imported from garbage collection: its last import.

Each collection visits all objects that are not frozen, and writes to each one. In a fork, that is
three hundred thousand objects, whose memory pages are copied first: a sixth of a second per
process.
"""

import gc

gc.collect()
gc.freeze()
