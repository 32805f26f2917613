"""The devices on which ranks compute: the CPU, accelerators, virtual GPUs, and their clocks.

    accelerator.py   PyTorch's functions for any type of accelerator, by `torch.device`
    device.py        the device of a rank, with its streams, and transfers between devices
    nvidia.py        what only NVIDIA GPUs have

A new type of device needs nothing here if its module has the functions of `torch.cuda`. At most it
gets a line in two tables: its collective library in `accelerator.py`, and the handle of its streams
in `device.py`.
"""
