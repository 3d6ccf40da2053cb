"""What probe measures: the list of tasks that every worker goes through, in order."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ahp.cluster.model import ProductPhase

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")

# (m, n, k): m tokens through a weight (n, k). Sizes from small blocks to a vocabulary head.
CPU_QUICK = (
    (64, 64, 64),
    (256, 128, 128),
    (256, 256, 256),
    (1024, 256, 256),
    (1024, 1024, 256),
    (1024, 256, 1024),
    (1024, 512, 512),
    (4096, 256, 256),
    (1024, 1024, 1024),
    (4096, 1024, 256),
    (1024, 8192, 256),
)
CPU_WEIGHTS = (
    (64, 64),
    (128, 128),
    (256, 256),
    (1024, 256),
    (256, 1024),
    (512, 512),
    (2048, 512),
    (512, 2048),
    (1024, 1024),
    (8192, 256),
    (2048, 2048),
    (8192, 1024),
)
CPU_TOKENS = (64, 256, 1024, 4096)
# (m, n, k) of the forward products whose gradients are measured; a full probe measures those of CPU_QUICK.
CPU_QUICK_GRADIENTS = ((256, 128, 128), (1024, 256, 256), (1024, 1024, 256), (1024, 8192, 256))
CUDA_QUICK = (
    (512, 512, 512),
    (2048, 1024, 1024),
    (2048, 4096, 4096),
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 8192, 8192),
)
CUDA_WEIGHTS = (
    (1024, 1024),
    (2048, 2048),
    (4096, 1024),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (8192, 8192),
    (128256, 4096),
)
CUDA_TOKENS = (1024, 2048, 4096, 8192, 16384)

# (heads, sequence, head dimension): the work grows as sequence squared, so longer sequences are left out.
CPU_QUICK_ATTENTION = ((8, 256, 32), (4, 256, 128), (4, 1024, 64))
CPU_ATTENTION = ((8, 64, 32), (8, 256, 32), (8, 256, 64), (8, 256, 128), (8, 1024, 32), (8, 1024, 64), (8, 1024, 128))
CUDA_QUICK_ATTENTION = ((32, 2048, 128), (32, 8192, 128))
CUDA_ATTENTION = ((32, 1024, 64), (32, 4096, 64), (32, 1024, 128), (32, 4096, 128), (32, 16384, 128))

# Elements of an element-wise operator: within the first caches, within the last, beyond them.
QUICK_ELEMENTS = (2**16, 2**20, 2**23)
FULL_ELEMENTS = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)

QUICK_SIZES_BYTES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
FULL_SIZES_BYTES = tuple(2**10 * 4**power for power in range(9))  # 1 KiB to 64 MiB


@dataclass(frozen=True)
class Task:
    """One measurement. ``kind`` is matmul, attention_forward, attention_backward, add, silu, memory, launch, or a collective."""

    kind: str
    workers: int
    """This many workers, the first ones, do it at once; the others wait."""
    m: int = 0
    n: int = 0
    k: int = 0
    dtype: str = ""
    phase: ProductPhase = "forward"
    """Of a product."""
    heads: int = 0
    """Heads of attention, whose sequence is ``m`` and head dimension ``k``."""
    elements: int = 0
    bytes: int = 0
    """Bytes of a collective's whole tensor (the gathered one for all-gather)."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        """The task as text, for a progress line."""
        if self.kind == "matmul":
            return f"matmul {self.m}x{self.n}x{self.k} {self.dtype}, {self.workers} at once"
        if self.kind in COLLECTIVES:
            return f"{self.kind} {self.bytes / 2**10:g} KiB over {self.workers}"
        if self.heads:
            what = self.kind.replace("_", " ")
            return f"{what} {self.heads}x{self.m}x{self.k} {self.dtype}, {self.workers} at once"
        return f"{self.kind}, {self.workers} at once"


def tasks(*, workers: int, on_cuda: bool, quick: bool) -> list[Task]:
    """All tasks for a node of ``workers`` workers. Small shapes of a dtype come first: they show which others are too slow."""
    counts = worker_counts(workers, quick=quick)
    dtypes = ("fp32", "bf16", "fp16") if on_cuda else ("fp32", "bf16")
    found = [Task("launch", workers)]
    found += [Task("memory", count) for count in counts]
    for count in counts:
        for dtype in dtypes:
            found += [Task("matmul", count, m, n, k, dtype) for m, n, k in shapes(on_cuda=on_cuda, quick=quick)]
            found += [] if on_cuda else _gradients(dtype, count, quick=quick)
            found += _beside_products(dtype, count, on_cuda=on_cuda, quick=quick)
    sizes = QUICK_SIZES_BYTES if quick else FULL_SIZES_BYTES
    for count in counts:
        for kind in COLLECTIVES:
            if count > 1 and (kind != "send_recv" or count % 2 == 0):
                found += [Task(kind, count, bytes=_divisible(size, count)) for size in sizes]
    return found


def _gradients(dtype: str, count: int, *, quick: bool) -> list[Task]:
    """Products of the backward pass. In bf16, cores without instructions for it compute them up to ten times slower than forward products or
    three times faster."""
    found: list[Task] = []
    for m, n, k in CPU_QUICK_GRADIENTS if quick else CPU_QUICK:
        found.append(Task("matmul", count, m, k, n, dtype, "input_gradient"))
        found.append(Task("matmul", count, n, k, m, dtype, "weight_gradient"))
    return sorted(found, key=lambda task: task.m * task.n * task.k)


def _beside_products(dtype: str, count: int, *, on_cuda: bool, quick: bool) -> list[Task]:
    """Attention and element-wise operators: on a CPU they take much of a small model's time."""
    if on_cuda:
        attention = CUDA_QUICK_ATTENTION if quick else CUDA_ATTENTION
    else:
        attention = CPU_QUICK_ATTENTION if quick else CPU_ATTENTION
    found = [
        Task(f"attention_{phase}", count, m=sequence, k=head_dim, dtype=dtype, heads=heads)
        for heads, sequence, head_dim in attention
        for phase in ("forward", "backward")
        if not (on_cuda and dtype == "fp32")  # no fused kernel there
    ]
    elements = QUICK_ELEMENTS if quick else FULL_ELEMENTS
    return found + [Task(kind, count, dtype=dtype, elements=n) for kind in ("add", "silu") for n in elements]


def worker_counts(workers: int, *, quick: bool) -> list[int]:
    """How many workers measure at once: one, all, and the powers of two between (only the first if ``quick``)."""
    between = [2**power for power in range(1, workers.bit_length()) if 2**power < workers]
    return sorted({1, workers, *(between[:1] if quick else between)})


def shapes(*, on_cuda: bool, quick: bool) -> list[tuple[int, int, int]]:
    """(m, n, k) of the matrix products, sorted by work."""
    if quick:
        found = list(CUDA_QUICK if on_cuda else CPU_QUICK)
    else:
        weights, tokens = (CUDA_WEIGHTS, CUDA_TOKENS) if on_cuda else (CPU_WEIGHTS, CPU_TOKENS)
        found = [(m, n, k) for m in tokens for n, k in weights]
    return sorted(found, key=lambda s: s[0] * s[1] * s[2])


def _divisible(size_bytes: int, workers: int) -> int:
    """The size rounded up so that every worker has the same number of fp32 elements."""
    share = 4 * workers
    return -(-size_bytes // share) * share
