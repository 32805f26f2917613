"""The named families of schedules. Each is a function of sizes that returns a `Schedule`.

    common.py        placements, checks of sizes, phases that several families share
    gpipe.py         naive, gpipe, looped-bfs, forward-only
    one_f_one_b.py   1f1b, eager-1f1b, interleaved
    zero_bubble.py   zb-h1, zb-h2, interleaved-zb: backwards split into I and W
    v_shape.py       zb-v, v-half, v-min: two stages per rank, placed like a V
    dualpipe.py      dualpipe-v

The docstring of each module shows its schedules as pictures. `registry.py`, one folder up, lists
all families.
"""
