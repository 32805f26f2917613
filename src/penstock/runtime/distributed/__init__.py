"""One rank a process, over torch.distributed: the same worker, another transport."""
