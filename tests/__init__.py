"""The tests mirror the tree of the package; `support` is what several of them share."""
