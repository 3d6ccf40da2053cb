"""The pipeline schedules by name. ``plan.ScheduleName`` lists the same names, and Synthesized for an order that a plan brings."""

from __future__ import annotations

from ahp.errors import bad_input
from ahp.schedule.descriptor import PipelineSchedule
from ahp.schedule.dual_pipe_v import DualPipeV
from ahp.schedule.gpipe import GPipe
from ahp.schedule.interleaved import Interleaved1F1B
from ahp.schedule.interleaved_zero_bubble import InterleavedZeroBubble
from ahp.schedule.one_f_one_b import OneForwardOneBackward
from ahp.schedule.zbv import ZBVZeroBubble

PLAIN = OneForwardOneBackward.name
"""The default schedule, and that of a single rank, which has no other rank to wait for."""

SCHEDULES: dict[str, PipelineSchedule] = {
    schedule.name: schedule
    for schedule in (
        GPipe(),
        OneForwardOneBackward(),
        Interleaved1F1B(),
        InterleavedZeroBubble(),
        ZBVZeroBubble(),
        DualPipeV(),
    )
}


def get(name: str) -> PipelineSchedule:
    """The schedule of that name. Raises BadInput for an unknown one."""
    if name not in SCHEDULES:
        raise bad_input("pipeline_parallel_schedule", name, "there is no such schedule", SCHEDULES)
    return SCHEDULES[name]


def of_ranks(name: str, p: int) -> PipelineSchedule:
    """The schedule that p ranks run; a single rank runs the plain one, whatever ``name`` is."""
    return get(name if p > 1 else PLAIN)
