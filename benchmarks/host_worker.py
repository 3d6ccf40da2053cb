"""One worker of a host that measures layouts, ``python host_worker.py NUMBER SETTINGS.json``, started by ``hosts.py`` on each.

It stays for all rounds over all layouts: the hosts join anew for each. What it measures goes to stdout, a JSON line for each layout and round.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MEET_S = 600
"""Hosts wait for each other for so long after a layout: the slow one has a step of its own to end."""


def step_times_s(plan: Any, task: Any, warmup: int, steps: int) -> list[float]:
    """Seconds of each step under a plan, on all who have joined."""
    import torch.distributed as dist

    import ahp
    from ahp.runtime.torch_compat import forget_meshes

    parallel = ahp.parallelize(task.build(), plan, device="cpu")
    times_s = []
    for number in range(warmup + steps):
        ids = task.batch(number)
        dist.barrier()
        start = time.perf_counter()
        parallel.step(parallel.shard({"input_ids": ids, "labels": ids}))
        dist.barrier()
        times_s.append(time.perf_counter() - start)
    dist.destroy_process_group()
    del parallel
    forget_meshes()
    gc.collect()
    return times_s[warmup:]


class Hosts:
    """This host among the others, through a store that the first keeps."""

    def __init__(self, number: int, size: int, address: str, port: int) -> None:
        import torch.distributed as dist

        self.number, self.size, self.address, self.port = number, size, address, port
        self.store = dist.TCPStore(address, port, is_master=number == 0, timeout=timedelta(seconds=MEET_S))
        self.met = 0

    def meet(self) -> None:
        self.met += 1
        if self.store.add(f"met/{self.met}", 1) == self.size:
            self.store.set(f"all/{self.met}", "")
        self.store.wait([f"all/{self.met}"])

    def leave(self) -> None:
        """The first host, which keeps the store, exits last: else the last request of another host would fail."""
        self.store.add("left", 1)
        while self.number == 0 and self.store.add("left", 0) < self.size:
            time.sleep(0.1)

    def set_launcher(self, turn: int, number: int, size: int) -> None:
        """As torchrun would tell a worker; each turn is another attempt, with names of its own in the store."""
        given = (number, size, 0, 1, self.address, self.port)
        os.environ.update({name: str(value) for name, value in zip(LAUNCHERS, given, strict=True)})
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(turn)}

    def unset_launcher(self) -> None:
        for name in LAUNCHERS:
            os.environ.pop(name, None)


def main(number: int, settings: dict[str, Any]) -> None:
    import socket

    import torch
    from task import Task

    from ahp.plan import Plan

    torch.set_num_threads(1)
    task, name = Task(**settings["task"]), socket.gethostname()
    hosts = Hosts(number, settings["size"], settings["address"], settings["port"])
    turn = 0
    for round_ in range(settings["rounds"]):
        for index, layout in enumerate(settings["layouts"]):
            turn += 1
            alone = layout["alone"]
            # In the order of the hosts, of which the first is the slowest: the plan's own order must come from what they are.
            part = [one for one in settings["names"] if one in layout["on"]]
            if alone is not None:
                hosts.unset_launcher()
            elif name in part:
                hosts.set_launcher(turn, part.index(name), len(part))
            hosts.meet()
            plan = alone[name] if alone is not None else layout["plan"]
            if alone is not None or name in part:
                times_s = step_times_s(Plan.model_validate(plan), task, settings["warmup"], settings["steps"])
                print(json.dumps({"round": round_, "layout": index, "host": name, "seconds": times_s}), flush=True)
            hosts.meet()
    hosts.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
