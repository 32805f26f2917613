"""Programs run over stages: the worker, what carries its messages, and two runtimes."""
