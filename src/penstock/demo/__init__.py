"""The model, the data and the measurements of `penstock demo`.

model       a byte-level transformer as a flat Sequential, and batches of text to train it on: the
            sources of Python's standard library, which are on every machine
session     the devices, training, generating text, measuring, and the comparison with the unsplit
            model
"""
