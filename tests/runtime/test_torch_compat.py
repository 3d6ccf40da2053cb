"""Private PyTorch that only a look at what is left behind can check."""

from __future__ import annotations

import psutil
import pytest

from ahp.runtime.pipeline.torch_compat import pipeline_of_steps
from ahp.schedule.messages import with_messages
from ahp.schedule.patterns import make
from tests.runtime.models import JOB
from tests.runtime.test_equality import LAYOUTS, train
from tests.runtime.workers import Pool
from tests.schedule.test_patterns import torchs_stage


def num_threads(rank: int, world: int) -> int:
    return psutil.Process().num_threads()


def test_layouts_that_are_gone_leave_no_threads(pool: Pool) -> None:
    """The pool asks ``forget_meshes`` after each; without it gloo's threads of every group of the layout stay."""
    found = []
    for layout in ("1f1b", "tp"):  # the first, which has no mesh of weights, starts threads that are torch's own
        pool.run(train, 2, "llama", LAYOUTS[layout], 1, JOB)
        found.append(max(pool.run(num_threads, 2)))
    assert found[1] <= found[0] + 1, found  # a group has three


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_one_stage_on_a_rank_is_gathered_by_its_blocks(name):
    """As under torch's own schedules of these names: else the first forward would wait for the weights of the whole stage."""
    ranks = [[str(step) for step in rank] for rank in with_messages(make(name, 2, 1, 3), receives_first=True)]
    stage = torchs_stage()
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod, stage.stage_index = 1, 2, 2, None, 1
    ahead, by_blocks = (
        [str(action) for action in pipeline_of_steps([stage], ranks, n_microbatches=3, gathers_ahead=gathers).pipeline_order_with_comms[1]]
        for gathers in (True, False)
    )  # fmt: skip
    assert [word for word in ahead if "SHARD" not in word] == by_blocks
    assert len(ahead) > len(by_blocks)
    assert by_blocks[:4] == ["1RECV_F0", "1RECV_F1", "1RECV_F2", "1F0"]
    assert sum("REDUCE_GRAD" in word for word in by_blocks) == 1
