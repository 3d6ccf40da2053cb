"""Numbers of devices that can be busy, and those that are too many to be searched."""

from __future__ import annotations

import pytest

from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.search.feasible_space import MOST_DEVICES, busy_counts, legal_rows, refuse_too_many
from ahp.search.problem import with_devices

from .small import small


@pytest.mark.slow
def test_a_number_that_can_be_busy_is_one_with_a_legal_layout() -> None:
    asked = small("llama", "1x14xH100-SXM-80GB", batch=6)
    counts = busy_counts(asked)
    legal = []
    for count in range(14, 0, -1):
        part = with_devices(asked.cluster, count)
        if part is not None and legal_rows(asked.on(part)).problem.cluster.num_devices == count:
            legal.append(count)
    assert counts == legal


def test_a_million_nodes_are_refused_at_once_with_what_could_be_busy() -> None:
    with pytest.raises(
        BadInput, match=rf"8,000,000 devices.*{MOST_DEVICES:,} are searched at most; 8 sequences .* busy"
    ):
        refuse_too_many(small("llama", "1000000x8xH100-SXM-80GB", batch=8))
    refuse_too_many(small("llama", "16384x8xH100-SXM-80GB", batch=8))


def test_devices_are_taken_as_many_of_each_node_on_the_fewest() -> None:
    cluster = Cluster.parse("4x6xGB200-NVL72")
    for count, shape in (
        (24, (4, 6)),
        (18, (3, 6)),
        (20, (4, 5)),
        (12, (2, 6)),
        (10, (2, 5)),
        (9, (3, 3)),
        (5, (1, 5)),
    ):
        part = with_devices(cluster, count)
        assert part is not None
        group = part.groups[0]
        assert (group.nodes, group.devices_per_node) == shape
        assert group.devices_per_nvlink_domain is None or group.devices_per_nvlink_domain % shape[1] == 0
    assert with_devices(cluster, 23) is None
    assert with_devices(cluster, 25) is None
