"""Planning: which cut, placement, schedule, micro-batches, recomputation and runtime are fastest.

profile.py      the model and the devices as numbers, saved as JSON
stage_costs.py  from units to stages: the costs of a cut
plan.py         `Plan`: the choice, its forecast and its certificate
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
]
