"""LongBench v1 (Bai et al., 2024) and v2 (Bai et al., 2025) by the official protocols (paper 3.2, 4.6)."""

from ridgefill.eval.longbench.files import read_longbench, read_longbench_v2
from ridgefill.eval.longbench.groups import accuracy_by_group, regroup
from ridgefill.eval.longbench.measure import measure_longbench
from ridgefill.eval.longbench.sample import Sample
from ridgefill.eval.longbench.tasks import TASKS

__all__ = [
    "TASKS",
    "Sample",
    "accuracy_by_group",
    "measure_longbench",
    "read_longbench",
    "read_longbench_v2",
    "regroup",
]
