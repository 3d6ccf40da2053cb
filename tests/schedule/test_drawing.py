"""A drawing has what each rank does when."""

from ahp.schedule.drawing import drawing
from ahp.schedule.patterns import make
from ahp.schedule.simulate import StageTimes, simulate


def test_a_letter_for_each_second():
    timeline = simulate(make("1F1B", 2, 1, 3), [StageTimes(1.0, 2.0)] * 2)
    assert drawing(timeline, 12) == ["FF..BBFBB.BB", ".FBBFBBFBB.."]
    assert drawing(timeline, 16, whole_s=16.0) == ["FF..BBFBB.BB....", ".FBBFBBFBB......"]


def test_higher_stages_of_a_rank_are_small():
    timeline = simulate(make("InterleavedZeroBubble", 2, 2, 2), [StageTimes(1.0, 2.0, 1.0, 1.0)] * 4)
    first = drawing(timeline, round(timeline.makespan_s))[0]
    assert first.startswith("FFff")
    assert sorted(first.replace(".", "")) == sorted("FFIIWWffiiww")
