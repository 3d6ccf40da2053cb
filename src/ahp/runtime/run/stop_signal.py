"""A wish to stop, noted when it comes and looked at between steps.

Free of torch, so that a worker can listen before it spends seconds on imports.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from types import FrameType


@dataclass
class StopRequest:
    """Remembers that SIGINT or SIGTERM came; the loop looks at it between steps.

    A parent that has gone counts as SIGTERM: nobody could stop an orphan otherwise.
    """

    received: int = 0
    parent: int = field(default_factory=os.getppid)

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def pending(self) -> int:
        """Number of the signal, 0 for none."""
        if not self.received and os.getppid() != self.parent:
            self.received = int(signal.SIGTERM)
        return self.received

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
