"""Does every exported form of a policy act as the trained one does? (`msrl-check`)"""

from msrl_accel.consistency.checker import check_consistency, recommend_precision
from msrl_accel.consistency.compare import Tolerances
from msrl_accel.consistency.precision import PrecisionLimits, PrecisionReport
from msrl_accel.consistency.report import ConsistencyReport

__all__ = [
    "ConsistencyReport",
    "PrecisionLimits",
    "PrecisionReport",
    "Tolerances",
    "check_consistency",
    "recommend_precision",
]
