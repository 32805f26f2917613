"""`penstock.init`: from the environment variables of `torchrun` to a device mesh.

In the order of events: `torchrun_env.py` reads the environment variables and chooses the device,
and `init.py` lets the ranks find each other in a TCP store and creates the process group and the
mesh.
"""
