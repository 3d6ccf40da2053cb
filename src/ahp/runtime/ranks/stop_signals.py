"""Signals that ask a run to save and end. Does not import torch, so that a worker can listen before it spends seconds on imports."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; what schedulers and Kubernetes send before they kill; what Slurm's ``--signal=USR1@120`` sends before an allocation ends."""
