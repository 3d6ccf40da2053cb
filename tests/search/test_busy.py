"""Numbers of devices that can be busy, and those that are too many to be searched."""

from __future__ import annotations

import pytest

from ahp.errors import BadInput
from ahp.search.busy import MOST_DEVICES, busy_counts, refuse_too_many
from ahp.search.feasible_space import legal_rows
from ahp.search.problem import with_devices

from .small import small


@pytest.mark.slow
def test_a_number_that_can_be_busy_is_one_with_a_legal_layout() -> None:
    asked = small("llama", "1x14xH100-SXM-80GB", batch=6)
    counts = busy_counts(asked)
    legal = []
    for count in range(14, 0, -1):
        used = asked.on(with_devices(asked.cluster, count))
        if legal_rows(used).problem.cluster.num_devices == count:
            legal.append(count)
    assert counts == legal


def test_a_million_nodes_are_refused_at_once_with_what_could_be_busy() -> None:
    with pytest.raises(
        BadInput, match=rf"8,000,000 devices.*{MOST_DEVICES:,} are searched at most; 8 sequences .* busy"
    ):
        refuse_too_many(small("llama", "1000000x8xH100-SXM-80GB", batch=8))
    refuse_too_many(small("llama", "16384x8xH100-SXM-80GB", batch=8))
