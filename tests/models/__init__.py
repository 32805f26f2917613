"""The zoo: architectures as their authors write them, each split and compared with itself."""
