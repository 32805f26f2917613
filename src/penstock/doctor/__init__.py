"""What `penstock doctor` finds out: about each rank, about their links, and what to fix."""
