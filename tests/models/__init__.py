"""The model zoo: architectures as their authors write them, each compared with its pipe."""
