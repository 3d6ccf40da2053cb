"""Host work of engines for each operator and each unit of communication, with its provenance."""

from __future__ import annotations

from ahp.shipped import Constants

host = Constants("ahp.engines", "host.yaml")
