"""A pipe whose ranks are processes, over `torch.distributed`. README.md has the overview."""
