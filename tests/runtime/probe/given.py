"""The command ``ahp`` on a host that need not measure itself: what it would find is given. Its links to others are measured."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from ahp.cli.main import main
from ahp.cluster.model import Cluster
from tests.cluster.test_hosts import host


def probe(**_: Any) -> Cluster:
    return Cluster(groups=(host("here").nodes,))


def run(words: list[str]) -> int:
    with mock.patch("ahp.cluster.measure.probe", probe):
        return main(words)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
