"""What `penstock demo` runs: a small transformer, a text that is on every machine, and its checks.

text        the sources of Python's standard library, and random pieces of them
model       a byte-level transformer as a flat Sequential
devices     what there is to run it on, and pipes over that
session     training, writing, measuring, and the comparison with the unsplit model
"""
