"""From what `torchrun` says to a mesh of ranks: `penstock.init`.

`launched.py` reads what the launcher says, `meeting.py` brings the ranks together, `init.py` makes
their group and the mesh.
"""
