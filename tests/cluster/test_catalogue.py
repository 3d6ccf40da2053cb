"""The catalogue: every device asked for, every figure with its source, dense peaks, names as drivers print them."""

from importlib import resources
from pathlib import Path

import pytest
import yaml

from ahp.cluster import catalogue
from ahp.errors import BadInput
from ahp.shipped import shipped

NAMES = """V100-SXM-16GB V100-SXM-32GB V100-PCIe-16GB V100-PCIe-32GB T4-16GB L4-24GB A10G-24GB A40-48GB L40-48GB
L40S-48GB A100-SXM-40GB A100-SXM-80GB A100-SXM-64GB A100-PCIe-40GB A100-PCIe-80GB A800-SXM-80GB H100-SXM-80GB
H100-SXM-64GB H100-PCIe-80GB
H100-NVL-94GB H800-SXM-80GB H20-96GB H200-SXM-141GB H200-NVL-141GB GH200-96GB GH200-144GB B200-SXM B300-SXM
GB200-NVL72 GB300-NVL72 MI250X MI300X MI325X MI350X MI355X RTX-3090-24GB RTX-4090-24GB RTX-5090-32GB RTX-A6000-48GB
RTX-6000-Ada-48GB RTX-PRO-6000-96GB cpu""".split()  # noqa: SIM905
DATA = yaml.safe_load(resources.files("ahp.cluster").joinpath("catalogue.yaml").read_text())
NOT_FIGURES = {"aliases", "link", "sources"}


def test_names() -> None:
    assert catalogue.names() == NAMES


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cpu"])
def test_every_figure_has_a_source(name: str) -> None:
    raw = DATA["devices"][name]
    sourced = {figure.strip() for figures in raw["sources"] for figure in figures.split(",")}
    assert sourced == set(raw) - NOT_FIGURES


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("V100-SXM-32GB", "fp16", 125),
        ("T4-16GB", "fp16", 65),
        ("L4-24GB", "bf16", 121),
        ("A100-SXM-80GB", "bf16", 312),
        ("H100-SXM-80GB", "bf16", 989.4),
        ("H100-SXM-80GB", "fp8", 1978.9),
        ("H20-96GB", "bf16", 148),
        ("B200-SXM", "bf16", 2250),
        ("GB300-NVL72", "bf16", 2500),
        ("MI250X", "bf16", 191.5),
        ("MI300X", "bf16", 1307.4),
        ("MI355X", "fp8", 5033.2),
        ("A40", "bf16", 149.7),
        ("H100 NVL", "bf16", 835.5),
        ("RTX 5090", "bf16", 209.5),
        ("L40S", "bf16", 366.5),
        ("A10G", "bf16", 70),
        ("RTX-4090-24GB", "bf16", 165.2),
    ],
)
def test_dense_peaks(name: str, precision: str, tflops: float) -> None:
    assert catalogue.find(name).device.peak_flops_per_s[precision] == pytest.approx(tflops * 1e12)


def test_precisions_that_are_not_there() -> None:
    assert "bf16" not in catalogue.find("V100-SXM-16GB").device.peak_flops_per_s
    assert "bf16" not in catalogue.find("T4").device.peak_flops_per_s
    assert "fp8" not in catalogue.find("A100").device.peak_flops_per_s


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cpu"])
def test_the_forecast_knows_every_device_by_name(name: str) -> None:
    """Names that it does not know count as data-center devices of the Ampere generation."""
    for file, starts in (("kernels.yaml", lambda row: [row["name"]]), ("nccl.yaml", lambda row: row["starts"])):
        rows = shipped("ahp.forecast", file)["devices"]
        assert any(start and name.startswith(start) for row in rows for start in starts(row)), file


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cpu"])
def test_figures_hang_together(name: str) -> None:
    entry = catalogue.find(name)
    device = entry.device
    peaks = device.peak_flops_per_s
    assert peaks["fp16"] >= 2 * peaks["fp32"] * 0.99
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    assert peaks.get("fp8", 2 * peaks["fp16"]) == pytest.approx(2 * peaks["fp16"], rel=0.01)
    # What is left for tensors: the driver and the context take some, never more than a tenth.
    assert 0 < device.reserved_memory_bytes < 0.1 * device.memory_bytes
    assert device.memory_bandwidth_bytes_per_s > entry.intra_node.bandwidth_bytes_per_s
    assert device.power_limit_w == device.rated_power_w
    assert "tuning.cc" in entry.intra_node.source


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "H100-SXM-80GB"),
        ("H100-SXM-80GB", "H100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("nvidia_a100-sxm4-80gb", "A100-SXM-80GB"),
        ("Tesla-V100-SXM2-16GB", "V100-SXM-16GB"),
        ("rtx 4090", "RTX-4090-24GB"),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
    ],
)
def test_near_names(spelling: str, name: str) -> None:
    assert catalogue.find(spelling).device.name == name


@pytest.mark.parametrize(
    ("printed", "mib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL", 95830, "H100-NVL-94GB"),
        ("NVIDIA H200 NVL", 143771, "H200-NVL-141GB"),
        ("NVIDIA H200", 143771, "H200-SXM-141GB"),
        ("Tesla V100-PCIE-32GB", 32768, "V100-PCIe-32GB"),
        ("Tesla V100-SXM2-32GB", 32510, "V100-SXM-32GB"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-SXM-40GB"),
        ("NVIDIA A100-SXM-64GB", 65536, "A100-SXM-64GB"),
        ("NVIDIA H100", 65247, "H100-SXM-64GB"),
        ("NVIDIA A100-PCIE-40GB", 40960, "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-PCIe-80GB"),
        ("NVIDIA GH200 480GB", 97871, "GH200-96GB"),
        ("NVIDIA H20", 97871, "H20-96GB"),
        ("NVIDIA B300 SXM6 AC", 275040, "B300-SXM"),
        ("NVIDIA A10", 23028, None),
        ("NVIDIA A10G", 23028, "A10G-24GB"),
        ("NVIDIA L40S", 46068, "L40S-48GB"),
        ("NVIDIA L40", 46068, "L40-48GB"),
        ("NVIDIA A40", 46068, "A40-48GB"),
        ("NVIDIA GH200 144G HBM3e", 146831, "GH200-144GB"),
        ("AMD Instinct MI250X", 65520, "MI250X"),
        ("NVIDIA GeForce RTX 5090", 32607, "RTX-5090-32GB"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX-6000-Ada-48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "RTX-PRO-6000-96GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, None),
        ("NVIDIA RTX 5880 Ada Generation", 49140, None),
        ("NVIDIA RTX A5500", 24564, None),
        ("NVIDIA RTX A6000", 49140, "RTX-A6000-48GB"),
    ],
)
def test_names_that_drivers_print(printed: str, mib: int, name: str | None) -> None:
    entry = catalogue.match(printed, mib * 2**20)
    assert (entry.device.name if entry else None) == name


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"device = 'H10O-SXM-80GB'.*H100-SXM-80GB"):
        catalogue.find("H10O-SXM-80GB")


def test_usual_network_goes_with_the_devices_of_a_node() -> None:
    entry = catalogue.find("H100")
    whole, half = entry.inter_node(8), entry.inter_node(4)
    assert whole is not None
    assert half is not None
    assert whole.bandwidth_bytes_per_s == 8 * 400e9 / 8
    assert half.bandwidth_bytes_per_s == whole.bandwidth_bytes_per_s / 2
    assert catalogue.find("RTX-3090-24GB").inter_node(8) is None


def test_cpu_is_a_core_of_this_machine() -> None:
    entry = catalogue.find("CPU")
    assert entry.device.name == "cpu"
    assert 1e8 < entry.device.memory_bandwidth_bytes_per_s < 1e13
    assert 1e9 < entry.device.peak_flops_per_s["fp32"] < 1e13
    assert entry.devices_per_node >= 1


def test_the_page_lists_the_catalogue() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    for name in NAMES[:-1]:
        device = catalogue.find(name).device
        peaks = device.peak_flops_per_s
        row = f"| {name} | {peaks.get('bf16', peaks['fp16']) / 1e12:g} | {device.memory_bytes / 2**30:.1f} |"
        assert row in page
