"""What was measured on, in words and as data."""

from __future__ import annotations

import datetime
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from workers import num_cores, threads_each


@dataclass(frozen=True)
class Machine:
    """This machine as far as a figure depends on it."""

    cpu: str
    cores: int
    memory_gib: float
    workers: int
    threads_each: int
    system: str
    python: str
    torch: str
    transformers: str
    ahp: str
    date: str

    def words(self) -> str:
        """One line for tables and pages."""
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB; {self.workers} workers on gloo with "
            f"{self.threads_each} thread{'s' if self.threads_each > 1 else ''} each; {self.system}; "
            f"Python {self.python}, torch {self.torch}, transformers {self.transformers}, ahp {self.ahp}; {self.date}"
        )

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def machine(num_workers: int) -> Machine:
    """Read from the system; the processor's model and family where its name alone says little."""
    import psutil

    from ahp.about import __version__
    from ahp.cluster import sense

    return Machine(
        cpu=sense.cpu_name(),
        cores=num_cores(),
        memory_gib=psutil.virtual_memory().total / 2**30,
        workers=num_workers,
        threads_each=threads_each(num_workers),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=version("torch"),
        transformers=version("transformers"),
        ahp=__version__,
        date=datetime.date.today().isoformat(),
    )
