"""The devices that are known without measuring them: peak, memory, and the node that they usually come in.

Names are found regardless of case and punctuation, by short forms (h100, rtx 4090) and as drivers print them; --json has
these names, every figure and its source. A machine of your own is measured with ahp probe.
"""

from __future__ import annotations

from dataclasses import dataclass

from ahp.cli.listing import show_catalogue
from ahp.cli.options import options_of
from ahp.cluster.catalogue import BYTES_PER_S_PER_GBPS, CPU, Entry, find, names
from ahp.optional import Flag
from ahp.words import GIB

COLUMNS = (
    "TFLOP/s: dense, in bf16 (V100 and T4 have none: fp16) and in fp8; link: GB/s to the devices of the node, one way; network: Gb/s "
    "of a usual node. Short names such as h100 are found too. A machine of your own: ahp probe."
)


@dataclass(frozen=True)
class Arguments:
    json: Flag = False
    """Print one JSON list, with every figure, its source and the other names."""


def run(argv: list[str]) -> int:
    """``ahp devices``. Returns the exit code."""
    arguments = options_of(Arguments, argv, "ahp devices", __doc__)
    entries = [find(name) for name in names() if name != CPU]  # this machine's own cores are measured, not known
    rows = [entry.model_dump(mode="json") for entry in entries]
    show_catalogue(
        rows, [_cells(one) for one in entries], COLUMNS, "ahp plan llama3-8b 8x8xH100", as_json=arguments.json
    )
    return 0


def _cells(entry: Entry) -> dict[str, str]:
    device, network = entry.device, entry.inter_node(entry.devices_per_node)
    peaks = device.peak_flops_per_s
    return {
        "device": device.name,
        "TFLOP/s": f"{peaks.get('bf16', peaks.get('fp16', 0.0)) / 1e12:,.0f}",
        "fp8": f"{peaks['fp8'] / 1e12:,.0f}" if "fp8" in peaks else "",
        "GiB": f"{device.memory_bytes / GIB:.1f}",
        "TB/s": f"{device.memory_bandwidth_bytes_per_s / 1e12:.2f}",
        "link": f"{entry.intra_node.bandwidth_bytes_per_s / 1e9:,.0f}",
        "per node": str(entry.devices_per_node),
        "network": "" if network is None else f"{network.bandwidth_bytes_per_s / BYTES_PER_S_PER_GBPS:,.0f}",
    }
