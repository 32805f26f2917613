"""One process a rank: what goes between processes, and how they learn of each other's faults."""
