"""A rank that hangs is named by whoever waits for it, and by whoever waits for one that waits."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ahp.plan import Parallelism
from ahp.runtime.ranks import hangs
from ahp.runtime.ranks.hangs import RankMissing, explained
from ahp.runtime.ranks.meeting import NoAnswer, absent, meet
from ahp.runtime.ranks.mesh import build_mesh
from ahp.runtime.ranks.preflight import preflight
from ahp.runtime.ranks.torch_compat import default_store, limit_time
from tests.runtime.workers import Pool

LIMIT_S, GIVE_UP_S = 1.0, 3.0


def one_hangs(rank: int, world: int, frozen: int) -> str:
    """Runs in each of four workers, pipelines beside replicas: what a rank says that waits, as in the middle of a step."""
    device = torch.device("cpu")
    limit_time(dist.group.WORLD, timedelta(seconds=LIMIT_S))
    layout = Parallelism(pipeline_parallel_degree=2, data_parallel_replicate_degree=2)
    mesh = build_mesh(layout, device)
    hosts = preflight(mesh)
    store, told = default_store(), [f"told/{other}" for other in range(world) if other != frozen]
    try:
        if rank == frozen:
            store.wait(told, timedelta(seconds=60))
        elif rank == 0:  # for the replica's gradients: one that waits itself, or the one that hangs
            dist.all_reduce(torch.ones(1), group=mesh.group("dp_replicate"))
        elif mesh.rank("pp") == 0:
            dist.recv(torch.ones(1), group=mesh.group("pp"), group_src=1)
        else:
            dist.recv(torch.ones(1), group=mesh.group("pp"), group_src=0)
    except RuntimeError as error:
        found = explained(error, mesh, hosts, 4, give_up_s=GIVE_UP_S)
        store.set(f"told/{rank}", "")
        assert isinstance(found, RankMissing)
        return str(found)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [3, 1])
def test_the_rank_that_hangs_is_named_by_all_that_wait(frozen: int) -> None:
    """On workers of its own: groups with an exchange that hangs do not end. Sends and receives wait no longer than all else."""
    pool, began_s = Pool(timeout_s=60.0), time.monotonic()
    try:
        said = pool.run(one_hangs, 4, frozen)
    finally:
        pool.close()
    assert time.monotonic() - began_s < 60
    host = socket.gethostname()
    for rank, words in enumerate(said):
        if rank != frozen:
            assert words.startswith(f"after step 4: rank {frozen} on {host} did not come to a collective on ax")
            assert f"within run.collective_timeout_s = {LIMIT_S:g}; rank {rank} on {host} waited: " in words
            assert "1000ms" in words
    if frozen == 3:
        assert "on axes pp, dp_replicate within" in said[0]  # not its neighbour
        assert "on axis pp within" in said[1]
        assert "on axis dp_replicate within" in said[2]


def test_every_axis_on_which_a_rank_was_waited_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 2 in a layout of four shards, two of which share experts."""
    groups = {"dp_shard": [0, 1, 2, 3], "ep": [2, 3]}
    mesh: Any = SimpleNamespace(size=lambda axis: len(groups.get(axis, [2])), group=lambda axis: axis)
    monkeypatch.setattr(hangs.dist, "get_process_group_ranks", groups.__getitem__)
    assert hangs._axes(mesh, [3]) == "axes dp_shard, ep"
    assert hangs._axes(mesh, [1]) == "axis dp_shard"


def test_gloo_says_what_happened_and_nothing_of_itself() -> None:
    said = "Read error [127.0.0.1]:1205: Connection reset by peer"
    advice = "This is typically caused by a remote worker hanging or bugs in the application. Check the logs. GLHF!"
    assert hangs._brief(RuntimeError(f"[/w/gloo/transport/tcp/pair.cc:537] {said}. {advice}")) == said
    assert hangs._brief(RuntimeError("another\nerror")) == "another"


def together(size: int, coming: range, within_s: float) -> dict[int, Any]:
    """What ``meet`` raised on each rank that comes."""
    store, found = dist.HashStore(), {}

    def run(rank: int) -> None:
        try:
            for _ in range(2):  # the second time in vain, where one is missing
                meet(store, rank, size, at="test", within_s=within_s)
            found[rank] = None
        except NoAnswer as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in coming]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_do_not_come_are_named() -> None:
    assert together(4, range(4), 20.0) == dict.fromkeys(range(4))
    for error in together(4, range(1, 3), 0.2).values():
        assert error.missing == [0, 3]
        assert str(error).startswith("ranks 0, 3 of 4 did not come to the test within 0.2 s; ranks 1, 2 did, on ")


def test_few_questions_find_the_few_that_are_absent() -> None:
    class Counting(dist.HashStore):
        asked = 0

        def check(self, keys: list[str]) -> bool:
            Counting.asked += 1
            return super().check(keys)

    store = Counting()
    for rank in range(1000):
        if rank not in (3, 700):
            store.set(f"{rank}", "")
    assert absent(store, {rank: f"{rank}" for rank in range(1000)}) == [3, 700]
    assert Counting.asked < 50
