"""The audit: the first step of each kind of batch is compared with the unsplit model."""
