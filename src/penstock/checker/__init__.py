"""A pipe against the unsplit model, on the user's own model and batch."""
