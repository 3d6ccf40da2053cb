"""What is computed once and shared by all who ask for it cannot be changed by one of them."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

import ahp
from ahp.errors import BadInput

JOB = ahp.Job(sequence_length=64, global_batch_size=8)


def changes(dicts: list[Any]) -> None:
    for one in dicts:
        key = next(iter(one))
        for change in (
            lambda one=one, key=key: one.__setitem__(key, 1.0),
            lambda one=one, key=key: one.__delitem__(key),
            lambda one=one, key=key: one.pop(key),
            lambda one=one, key=key: one.update({key: 1.0}),
            lambda one=one: one.setdefault("other", 1.0),
            lambda one=one: one.__ior__({"other": 1.0}),
            lambda one=one: one.popitem(),
            lambda one=one: one.clear(),
        ):
            with pytest.raises(BadInput, match="a record is not changed"):
                change()


def test_a_forecast_is_not_changed_for_who_asks_next() -> None:
    there: Any = {
        "model": "tiny",
        "cluster": "2xH100-SXM-80GB",
        "job": JOB,
        "parallelism": {"tensor_parallel_degree": 2},
    }
    found = ahp.simulate(**there)
    changes([found.step, found.memory])
    assert ahp.simulate(**there) == found


def test_a_device_of_the_catalogue_is_not_changed_for_who_names_it_next() -> None:
    """Nor silently left as it was: prices of a cluster are kept."""
    changes([ahp.Cluster.parse("8xH100").groups[0].device.peak_flops_per_s])
    device = ahp.Cluster.parse("8xH100").groups[0].device
    faster = device.model_copy(update={"peak_flops_per_s": {**device.peak_flops_per_s, "bf16": 2e15}})
    assert faster.peak("bf16") == 2e15


def test_it_is_copied_and_written_as_any_dict() -> None:
    found = ahp.Cluster.parse("8xH100").groups[0].device
    for other in (copy.deepcopy(found), copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert other == found
        changes([other.peak_flops_per_s])
    assert json.loads(json.dumps(found.peak_flops_per_s)) == found.peak_flops_per_s
    assert type(found.model_dump()["peak_flops_per_s"]) is dict
