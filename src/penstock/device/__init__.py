"""The devices on which ranks compute: the CPU, accelerators, virtual GPUs, and their clocks."""
