"""One process of a host that measures the host's links, ``python -m ahp.runtime.probe.link_worker STREAM SETTINGS.json``, started by ``team.py``.

Each host has one process for each stream that it sends at once. All processes go through the same rounds. In a round, the processes of a
pair of hosts make a process group of their own, as training does, and measure one direction after the other, while the host's other pairs
wait. For each pair the first process of the lower host prints a JSON line, and so does every process that fails.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ahp.errors import first_line

ACK_BYTES = 4
SIZES_BYTES = (ACK_BYTES, 2**16, 2**20, 2**22, 2**24, 2**26)
SLOWEST_S = 1.0
"""A size that would take longer is left out: at 100 Mb/s that of 16 MiB."""
FEWEST, MOST = 3, 200
JOIN_S, ROUND_S = 30, 120
"""How long a pair may take to join, and all hosts to end a round: an idle host waits for the slowest pair."""
PREFIX = "ahp/probe/links"


class LinkWorker:
    """A stream of a host."""

    def __init__(self, stream: int, settings: dict[str, Any]) -> None:
        self.stream, self.streams = stream, settings["workers"]
        self.host, self.hosts = settings["host"], settings["hosts"]
        self.rounds: list[list[tuple[int, int]]] = settings["rounds"]
        self.budget_s: float = settings["budget_s"]
        self.on_cuda: bool = settings["device"] == "cuda"
        self.device = torch.device("cuda", stream) if self.on_cuda else torch.device("cpu")
        if self.on_cuda:
            torch.cuda.set_device(self.device)
        host, port = settings["endpoint"]
        self.store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_S))

    def run(self) -> None:
        for number, pairs in enumerate(self.rounds):
            for pair in pairs:
                if self.host in pair:
                    self._measure(f"{PREFIX}/{number}", *pair)
            self._end_round(number)

    def _measure(self, key: str, low: int, high: int) -> None:
        is_low = self.host == low
        rank = self.stream + (0 if is_low else self.streams)
        partner = (rank + self.streams) % (2 * self.streams)
        said: dict[str, Any] = {"pair": [low, high]}
        try:
            dist.init_process_group(
                "nccl" if self.on_cuda else "gloo",
                store=dist.PrefixStore(f"{key}/{low}-{high}", self.store),
                rank=rank,
                world_size=2 * self.streams,
                timeout=timedelta(seconds=JOIN_S),
                device_id=self.device if self.on_cuda else None,
            )
            for sender in (low, high):
                said[str(sender)] = self._one_way(partner, sends=self.host == sender)
        except RuntimeError as error:
            said["error"] = first_line(error)
        if rank == 0 or "error" in said:
            print(json.dumps(said), flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _one_way(self, partner: int, *, sends: bool) -> dict[int, float]:
        """Seconds of a message there and a small one back, keyed by size; the slowest stream's, the same on both hosts."""
        found: dict[int, float] = {}
        before_bytes = 0
        for size in SIZES_BYTES:
            if found and found[before_bytes] * size / before_bytes > SLOWEST_S and before_bytes > 2**20:
                break
            message = torch.zeros(size, dtype=torch.uint8, device=self.device)
            ack = torch.zeros(ACK_BYTES, dtype=torch.uint8, device=self.device)
            self._exchange(message, ack, partner, sends)
            first_s = self._agreed(self._exchange(message, ack, partner, sends))
            calls = min(MOST, max(FEWEST, int(self.budget_s / first_s)))
            times = [self._exchange(message, ack, partner, sends) for _ in range(calls)]
            # The receiver's times include waiting for its turn, so the sender's times count.
            found[size] = self._agreed(statistics.median(times) if sends else 0.0)
            before_bytes = size
        return found

    def _exchange(self, message: torch.Tensor, ack: torch.Tensor, partner: int, sends: bool) -> float:
        start = time.perf_counter()
        if sends:
            dist.send(message, partner)
            dist.recv(ack, partner)
        else:
            dist.recv(message, partner)
            dist.send(ack, partner)
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
        return max(time.perf_counter() - start, 1.0e-9)

    def _agreed(self, seconds: float) -> float:
        """The longest time of all streams of the pair; they go on together."""
        slowest = torch.tensor([seconds], device=self.device, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def _end_round(self, number: int) -> None:
        """Wait for all hosts to end this round before the next one begins."""
        key = f"{PREFIX}/{number}"
        if self.store.add(f"{key}/done", 1) == self.hosts * self.streams:
            self.store.set(f"{key}/all", "")
        self.store.wait([f"{key}/all"], timedelta(seconds=ROUND_S))


def main(arguments: list[str]) -> None:
    """Measure as stream ``arguments[0]`` with the settings in the JSON file ``arguments[1]``."""
    LinkWorker(int(arguments[0]), json.loads(Path(arguments[1]).read_text())).run()


if __name__ == "__main__":
    main(sys.argv[1:])
