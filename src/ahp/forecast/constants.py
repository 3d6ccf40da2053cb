"""Constants of the forecast with their provenance; kernels.yaml has those of GPU kernels, nccl.yaml those of NCCL."""

from __future__ import annotations

from ahp.shipped import Constants

constants = Constants("ahp.forecast", "constants.yaml")
"""Of CPU workers, of hosts and of overlap."""

margins = Constants("ahp.forecast", "margins.yaml")
"""What the forecast cannot derive and takes from measured runs: allocator, communicators, errors."""
