"""Planning: which cut, placement, schedule, micro-batches, recomputation and runtime are fastest.

The modules, in reading order:

    profile.py         the model and the devices as numbers, saved as JSON
    stage_costs.py     from units to stages: the costs of a cut
    schedule_timer.py  one schedule, timed under many costs
    plan.py            `Plan`: the choice, its forecast and its certificate
    bound.py           seconds that no schedule, and no plan, can beat
    period_solver.py   the best pattern of one micro-batch, for many of them, with ortools
    solver.py          the best schedule of a cut by constraint programming, with ortools
    recomputed_fit.py  a schedule of `fit` in which some stages are recomputed
    search_space.py    the plans that are searched, in groups that are timed and bounded
    cut_moves.py       cuts and recomputed stages that may be faster than those that are known
    idle_speed.py      plans at the speed that idle ranks leave to the others
    search.py          `search_plan`: the fastest plan for a profile and a memory cap
"""

from penstock.planning.plan import Alternative, Certificate, Forecast, Plan
from penstock.planning.profile import (
    DeviceProfile,
    LinkProfile,
    PerRows,
    Profile,
    UnitProfile,
    UnitSeconds,
    ValueProfile,
    resolve_memory,
)
from penstock.planning.search import search_plan

__all__ = [
    "Alternative",
    "Certificate",
    "DeviceProfile",
    "Forecast",
    "LinkProfile",
    "PerRows",
    "Plan",
    "Profile",
    "UnitProfile",
    "UnitSeconds",
    "ValueProfile",
    "resolve_memory",
    "search_plan",
]
