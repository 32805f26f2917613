"""What a pipe can do, under every schedule: run, compared, and written into the docs."""
