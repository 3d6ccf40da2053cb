"""Plans for mixed clusters: which worker takes which place of the mesh, and that such a plan computes the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ahp.cluster import sense
from ahp.cluster.model import Cluster
from ahp.errors import BadInput, HardwareMismatch
from ahp.plan import Plan
from ahp.runtime.check.verify import verify
from ahp.runtime.ranks import device_order, launch
from ahp.runtime.ranks.device_order import (
    GROUP,
    Said,
    check_device,
    groups_of,
    mesh_places,
    numbers,
    own_group,
    probed_group,
)
from tests.runtime.models import JOB
from tests.runtime.test_equality import train
from tests.runtime.workers import Pool

CLUSTER = Cluster.from_dict(
    {
        "groups": [
            {"name": "new", "nodes": 1, "devices_per_node": 2, "device": "H100-SXM-80GB"},
            {"name": "old", "nodes": 1, "devices_per_node": 2, "device": "A100-SXM-40GB"},
        ],
        "links": [{"between": ["new", "old"], "gbps": 100}],
    }
)
SMALL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "vocab_size": 128}  # fmt: skip
REVERSED: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "tensor_parallel_degree": 2,
    "stages": [{"group": "old", "layers": 1}, {"group": "new", "layers": 3}],
}
CROSSED: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "data_parallel_replicate_degree": 2,
    "stages": [{"group": ["old", "new"], "layers": 1}, {"group": ["new", "old"], "layers": 3}],
    "micro_batches_per_replica": [5, 3],
}
"""Each replica begins on the other group than the other."""
IN_TURNS: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "virtual_stages_per_rank": 2,
    "data_parallel_replicate_degree": 2,
    "stages": [{"group": pair, "layers": 1} for pair in [["old", "new"], ["new", "old"]] * 2],
    "micro_batches_per_replica": [6, 2],
}
"""The same, with two stages on each rank."""


def plan(parallelism: dict[str, Any], cluster: Cluster | None = CLUSTER, **job: Any) -> Plan:
    return Plan.model_validate(
        {
            "model": SMALL,
            "job": {"sequence_length": 16, "global_batch_size": 8, "precision": "fp32", **job},
            "cluster": cluster.plain() if cluster is not None else None,
            "parallelism": parallelism,
        }
    )


def test_each_worker_takes_the_place_of_its_device() -> None:
    assert mesh_places(plan(REVERSED)) == [2, 3, 0, 1]
    assert mesh_places(plan(CROSSED)) == mesh_places(plan(IN_TURNS)) == [1, 2, 0, 3]
    in_order = {**REVERSED, "stages": REVERSED["stages"][::-1]}
    with pytest.raises(BadInput, match=r"stages.group = 'young': no group"):
        mesh_places(plan({**REVERSED, "stages": [{"group": "young", "layers": 4}, {"group": "old", "layers": 1}]}))
    for ordered in (plan(in_order), plan(REVERSED, None), plan({"data_parallel_replicate_degree": 4})):
        assert mesh_places(ordered) is None


def test_another_gpu_than_the_plan_has_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_029_158_912)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    check_device(plan(REVERSED), 2, torch.device("cuda", 0))
    check_device(plan(REVERSED), 0, torch.device("cpu"))
    with pytest.raises(
        HardwareMismatch, match="rank 0 runs on NVIDIA H100 80GB HBM3, the plan places it on A100-SXM-40GB"
    ):
        check_device(plan(REVERSED), 0, torch.device("cuda", 0))


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
@pytest.mark.parametrize("layout", [CROSSED, IN_TURNS], ids=["crossed", "in turns"])
def test_a_plan_for_a_mixed_cluster_equals_one_process(layout: dict[str, Any]) -> None:
    assert all(step.equal for step in verify(plan(layout), steps=2))


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_ranks_become_places_also_where_the_launchers_order_was_joined_first(tmp_path: Path) -> None:
    plan(CROSSED).save(tmp_path / "plan.yaml")
    launch.launch("tests.runtime.rejoin", [str(tmp_path)], num_workers=4, log_folder=tmp_path / "log")
    found = [(tmp_path / f"worker-{worker}").read_text() for worker in range(4)]
    assert found == ["0 1 1 6", "1 2 2 6", "2 0 0 6", "3 3 3 6"]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_stage_of_zero_that_shards_nothing_sums_once(pool: Pool, zero_stage: int) -> None:
    """bf16 goes through FSDP2 on one rank, whose stages would sum over the replicas at every micro-batch."""
    layout: dict[str, Any] = {"data_parallel_replicate_degree": 2, "micro_batches_per_replica": (5, 3)}
    job = {**JOB, "precision": "bf16"}
    plain = pool.run(train, 2, "llama", layout, 2, job)[0]
    staged = pool.run(train, 2, "llama", {**layout, "zero_stage": zero_stage}, 2, job)[0]
    assert staged["losses"] == plain["losses"]
    assert staged["norms"] == plain["norms"]


def test_rows_go_to_replicas_as_their_micro_batches(pool: Pool) -> None:
    layout = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1, "micro_batches_per_replica": (3, 1)}
    found = pool.run(rows, 2, {**layout, "micro_batch_size": 2}, 8)
    assert found == [range(6), range(6, 8)]
    with pytest.raises(Exception, match=r"rows must be a multiple of micro_batches_per_replica \[3, 1\]"):
        pool.run(rows, 2, {**layout, "micro_batch_size": 2}, 12)


def rows(rank: int, world: int, layout: dict[str, Any], num_rows: int) -> range:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize
    from tests.runtime.models import BUILDERS

    return parallelize(BUILDERS["llama"](), {"job": JOB, "parallelism": layout}).rows(num_rows)


def test_workers_are_numbered_by_what_they_say_of_their_devices() -> None:
    used = {"new": 2, "old": 2}
    assert numbers(used, ["new", "new", "old", "old"]) is None
    assert numbers(used, ["old", "old", "new", "new"]) == [2, 3, 0, 1]
    assert numbers(used, ["old", "new", "old", "new"]) == [2, 0, 3, 1]
    assert numbers(used, ["old", None, "old", "new"]) is None, "the launcher's order stands where one cannot say"
    with pytest.raises(
        HardwareMismatch, match="the plan needs 2 on new, 2 on old workers, and there are 1 on new, 3 on old"
    ):
        numbers(used, ["old", "new", "old", "old"])


def test_a_worker_knows_its_group_by_its_gpu_or_by_its_hosts_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_029_158_912)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert own_group(plan(REVERSED), torch.device("cuda", 0)) == "new"
    assert own_group(plan(REVERSED), torch.device("cpu")) is None
    monkeypatch.setenv(GROUP, "old")
    assert own_group(plan(REVERSED), torch.device("cpu")) == "old"
    monkeypatch.setenv(GROUP, "oldest")
    with pytest.raises(
        BadInput, match=r"AHP_GROUP = 'oldest': the plan's cluster has no such group \(valid: new, old\)"
    ):
        own_group(plan(REVERSED), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_ranks_follow_the_hosts_devices_and_not_their_order(tmp_path: Path) -> None:
    """Workers 0 and 2 are on hosts of the second group, 1 and 3 on hosts of the first."""
    plan(REVERSED).save(tmp_path / "plan.yaml")
    launch.launch("tests.runtime.on_groups", [str(tmp_path)], num_workers=4, log_folder=tmp_path / "log")
    ranks = [int((tmp_path / f"worker-{worker}").read_text()) for worker in range(4)]
    numbered = [2, 0, 3, 1]
    places = [2, 3, 0, 1]  # of the plan's mesh, by number: its first stage lies on the second group
    assert ranks == [places[number] for number in numbered]


def probed_plan() -> Plan:
    """Of two kinds of processor cores, on hosts that say their names."""
    plain = CLUSTER.plain()
    has = {"new": (["fast-1"], 2, None), "old": (["slow-1", "slow-2"], 1, 0.5)}
    for group in plain["groups"]:
        hosts, cores, processors = has[group["name"]]
        group["device"]["name"] = "cpu"
        host = {"cpu": "some", "cores": cores, "processors": processors}
        group.update(hosts=hosts, host={key: value for key, value in host.items() if value is not None})
    return plan(REVERSED, Cluster.from_dict(plain))


@pytest.mark.parametrize(
    ("name", "cores", "quota", "group"),
    [
        ("slow-2", 2, None, "old"),  # its name goes before what it has
        ("pod-17", 1, 0.5, "old"),
        ("pod-17", 2, None, "new"),
        ("pod-17", 8, None, None),
    ],
)
def test_a_host_finds_its_group_in_what_was_probed(
    name: str, cores: int, quota: float | None, group: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_order.socket, "gethostname", lambda: name)
    monkeypatch.setattr(sense, "cpu_name", lambda: "some")
    monkeypatch.setattr(sense, "physical_cores", lambda: cores)
    monkeypatch.setattr(sense, "cpu_quota", lambda: quota)
    assert probed_group(probed_plan(), torch.device("cpu")) == group
    assert own_group(probed_plan(), torch.device("cpu")) is None
    assert probed_group(plan(REVERSED), torch.device("cpu")) is None, "nobody probed it"


def test_workers_of_several_hosts_go_by_what_was_probed_and_a_stranger_is_refused() -> None:
    on = {"fast-1": "new", "slow-1": "old"}
    said = [Said(host, None, on[host]) for host in ("slow-1", "slow-1", "fast-1", "fast-1")]
    groups = groups_of(probed_plan(), said)
    assert numbers({"new": 2, "old": 2}, groups) == [2, 3, 0, 1], "whatever the order in which they came"
    told_otherwise = [Said("slow-1", "new", "old"), Said("fast-1", None, "new")]
    assert groups_of(probed_plan(), told_otherwise) == ["new", "new"], "AHP_GROUP goes first"
    alone = [Said("fast-1", None, "new")] * 4
    assert groups_of(probed_plan(), alone) == [None] * 4, "one host stands for all, as in ahp verify"
    strange = [*said[:3], Said("other", None, None)]
    with pytest.raises(
        HardwareMismatch,
        match=r"other: of none of the groups of the probed cluster \(new: fast-1; old: slow-1, slow-2\)",
    ):
        groups_of(probed_plan(), strange)
    assert groups_of(plan(REVERSED), strange)[3] is None, "a cluster by hand knows no hosts"
