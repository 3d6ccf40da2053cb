"""Kernel times on GPUs that nobody measured: the shape of a product, its roofs, attention and element-wise kernels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster.catalogue import find, names
from ahp.cluster.model import ElementWiseSample, Measurements, MemorySample
from ahp.forecast.efficiency import Rates, kind_of
from ahp.forecast.gpu import Gpu, constants

from .conftest import make_cluster

ROOT = Path(__file__).resolve().parents[2]
GPUS = [name for name in names() if name != "cpu" and find(name).device.num_sms]  # which would be measured first
A100, H100, B200 = (Gpu(find(name).device) for name in ("A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM"))
HALF = {name: "bf16" if "bf16" in find(name).device.peak_flops_per_s else "fp16" for name in GPUS}


def tflops(gpu, m, n, k, precision="bf16", batch=1, **kwargs):
    return 2e-12 * batch * m * n * k / gpu.product_s(batch, m, n, k, precision, **kwargs)


@pytest.mark.parametrize(
    ("gpu", "precision", "kernel"), [(H100, "bf16", "cudnn"), (H100, "fp32", "flash1"), (A100, "bf16", "flash1")]
)
def test_what_reads_a_mask_is_the_devices_own_kernel_or_the_efficient_one(gpu, precision, kernel):
    def seconds(name):
        return gpu.attention_s(1e12, 4096, 128, precision, backward=True, causal=False, kernel=name)

    assert seconds("masked") == seconds(kernel)
    assert seconds("masked") > 0


def test_every_device_of_the_catalogue_has_its_own_constants_with_sources():
    for name in GPUS:
        entry = next(e for e in constants()["devices"] if name.startswith(e["name"]))
        assert entry["name"], f"{name} is priced as an unknown device"
        sourced = {key.strip() for keys in entry["sources"] for key in keys.split(",")}
        assert {"half", "fp32", "fp8", "cache_mib"} & set(entry) <= sourced


@pytest.mark.parametrize("name", GPUS)
def test_a_large_product_reaches_the_sustained_rate(name):
    gpu, half = Gpu(find(name).device), HALF[name]
    reached = 2 * 16384**3 / gpu.product_s(1, 16384, 16384, 16384, half)
    reach = gpu.reach(half)
    assert reach.sustained <= reach.burst <= find(name).device.peak_flops_per_s[half]
    assert 0.94 * reach.sustained < reached < 1.000001 * reach.sustained


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GPUS), st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 40))
def test_no_product_beats_a_roof(name, m, n, k, batch):
    device, half = find(name).device, HALF[name]
    seconds = Gpu(device).product_s(batch, m, n, k, half)
    assert seconds >= 2 * batch * m * n * k / device.peak_flops_per_s[half]
    assert seconds >= 2 * batch * (m * k + k * n + m * n) / device.memory_bandwidth_bytes_per_s


def test_a_last_wave_of_one_tile_costs_a_wave():
    # 108 SMs: 6 x 18 tiles of 256 x 128 are one wave, one row more begins another, with smaller tiles at best.
    assert A100.product_s(1, 1537, 2304, 8192, "bf16") > 1.1 * A100.product_s(1, 1536, 2304, 8192, "bf16")


def test_a_small_output_is_split_along_k():
    # One tile for each of 4 SMs would leave 104 idle.
    assert tflops(A100, 256, 256, 16384) > 3 * 4 / 108 * A100.reach("bf16").burst / 1e12


@pytest.mark.parametrize(
    ("name", "side", "measured_tflops"),
    [
        ("V100-SXM-32GB", 1024, 57.3), ("V100-SXM-32GB", 2048, 78.2), ("V100-SXM-32GB", 4096, 95.7),
        ("A100-PCIe-80GB", 4096, 234.1), ("RTX-4090-24GB", 2040, 155.9),
    ],
)  # fmt: skip
def test_square_products_that_took_no_part_in_the_derivation(name, side, measured_tflops):
    # torch-performance-test-data issues 140 and 108, and pytorch issue 181718; none of their sizes is a constant here.
    assert tflops(Gpu(find(name).device), side, side, side, HALF[name]) == pytest.approx(measured_tflops, rel=0.12)


def test_an_h200_sustains_in_8_bits_what_an_h100_does():
    """The rate is derived from an H100's products. At the burst rate an H200's are forecast 12 % too fast."""
    rows = json.loads((ROOT / "benchmarks/kernels_h200.json").read_text(encoding="utf-8"))["eight_bit"]
    of_tensors = [row for row in rows if row["scales"] == "tensor" and row["seconds"] > 2e-4]
    gpu = Gpu(find("H200-SXM-141GB").device)
    errors = []
    for row in of_tensors:
        in_fp32 = 1.0 if row["fast_accumulate"] else gpu.fp32_sums
        errors.append(gpu.product_s(1, row["m"], row["n"], row["k"], "fp8") * in_fp32 / row["seconds"] - 1.0)
    assert len(errors) == 29
    assert abs(sum(errors)) / 29 < 0.05


def test_accumulating_in_fp32_costs_memory_that_nothing_hides():
    plain = A100.product_s(1, 4096, 4096, 4096, "bf16")
    added = A100.product_s(1, 4096, 4096, 4096, "bf16", output_bytes=4, accumulate=True)
    more_bytes = 4096**2 * (8 - 2)
    share = constants()["products"]["output_share"]
    assert added - plain == pytest.approx(share * more_bytes / 2.039e12, rel=0.3)
    added = H100.product_s(1, 4096, 4096, 4096, "bf16", output_bytes=4, accumulate=True)
    share = constants()["products"]["persistent_output_share"]["hopper"]
    assert added - H100.product_s(1, 4096, 4096, 4096, "bf16") == pytest.approx(share * more_bytes / 3.352e12)


def test_a_power_limit_slows_products_but_not_memory():
    device = find("H100-SXM-80GB").device
    limited = Gpu(device.model_copy(update={"power_limit_w": 500.0}))
    ratio = H100.product_s(1, 8192, 8192, 2**20, "bf16") / limited.product_s(1, 8192, 8192, 2**20, "bf16")
    assert ratio == pytest.approx((500 / 700) ** constants()["power"]["exponent"], rel=1e-4)  # but for the output
    assert limited.element_wise_s(1e9) == H100.element_wise_s(1e9)
    assert Gpu(device.model_copy(update={"power_limit_w": 900.0})).product_s(1, 512, 512, 512, "bf16") == (
        H100.product_s(1, 512, 512, 512, "bf16")
    )


def test_the_weights_of_experts_go_through_memory_beside_the_computation():
    """Measured on B200 by SimuMax: the computation alone, as it is priced in one kernel, would take 1.78 ms."""
    forward = B200.grouped_s(64, 512, 4096, 7168, "bf16")
    assert forward == pytest.approx(2.33e-3, rel=0.06)
    assert B200.grouped_s(64, 512, 4096, 7168, "bf16", kernel="fused") == pytest.approx(1.78e-3, rel=0.01)
    how = {"output_bytes": 4.0, "accumulate": True, "makes_weights": True}
    assert B200.grouped_s(64, 4096, 7168, 512, "bf16", **how) == pytest.approx(3.90e-3, rel=0.1)
    assert B200.grouped_s(64, 512, 4096, 7168, "fp8") < 0.6 * forward  # half of the weights' bytes, too


def test_precisions_have_their_own_rates():
    assert tflops(H100, 8192, 8192, 8192, "fp8") > 1.7 * tflops(H100, 8192, 8192, 8192, "bf16")
    assert tflops(A100, 8192, 8192, 8192, "fp32") == pytest.approx(19.1, rel=0.05)
    # No units for it: as fp32, not as half.
    assert A100.reach("fp8") == A100.reach("fp32")


def test_experts_in_one_kernel_are_not_launched_one_by_one():
    shape = (160, 32, 512, 512, "bf16")
    launched, at_once = B200.grouped_s(*shape), B200.grouped_s(*shape, kernel="fused")
    assert launched == pytest.approx(160 * constants()["groups"]["launch_s"])
    assert at_once < launched / 10
    assert B200.grouped_s(*shape, kernel="torch") < launched / 10


def test_an_address_for_each_element_takes_longer_than_memory():
    """Measured on H200: 2 ** 28 elements of bf16 to fp32 in 749 us; memory alone would take half of that."""
    h200, elements = Gpu(find("H200-SXM-141GB").device), 2**28
    assert h200.unvectorized_s(elements) == pytest.approx(749e-6, rel=0.02)
    assert h200.unvectorized_s(elements) > 1.8 * h200.element_wise_s(6 * elements)
    assert A100.unvectorized_s(elements) == pytest.approx(elements / (1.37 * 108 * 1.41e9), rel=0.01)  # 64 lanes an SM
    a40 = find("A40").device  # of compute capability 8.6: 128
    assert Gpu(a40).unvectorized_s(elements) == pytest.approx(
        elements / (1.37 * a40.peak_flops_per_s["fp32"] / 256), rel=0.01
    )


def attention(gpu, sequence, head_dim=128, *, heads=64.0, backward=False, causal=True, **kwargs):
    """TFLOP/s on the FLOPs done."""
    flops = (5 if backward else 2) * 2.0 * heads * sequence**2 * head_dim * (0.5 if causal else 1.0)
    seconds = gpu.attention_s(flops, sequence, head_dim, "bf16", backward=backward, causal=causal, **kwargs)
    return flops / seconds / 1e12


def test_attention_rises_with_sequence_and_head_width():
    for backward in (False, True):
        assert attention(H100, 512, backward=backward) < attention(H100, 4096, backward=backward)
        assert attention(H100, 4096, 64, backward=backward) < attention(H100, 4096, 128, backward=backward)
    assert attention(H100, 2048, causal=True) < attention(H100, 2048, causal=False)


@pytest.mark.parametrize("backward", [False, True])
def test_the_softmax_takes_as_long_on_slower_tensor_units(backward):
    """Half the products and the same other units: what a head of half the width loses is the same time."""
    peaks = H100.device.peak_flops_per_s
    slower = Gpu(H100.device.model_copy(update={"peak_flops_per_s": {**peaks, "bf16": peaks["bf16"] / 2}}))

    def lost(gpu):
        narrow, wide = (attention(gpu, 2**17, width, backward=backward, causal=False) for width in (32, 64))
        return 1 / narrow - 1 / wide

    assert lost(slower) == pytest.approx(lost(H100), rel=0.01)


def test_attention_waits_for_products_alone_where_these_are_slow():
    h20 = Gpu(find("H20").device)
    shares = [attention(gpu, 65536, causal=False) / gpu.reach("bf16").burst * 1e12 for gpu in (h20, H100)]
    assert shares[0] > 0.85 > 0.75 > shares[1]


def test_attention_of_few_heads_waits_for_its_last_block():
    assert attention(A100, 4096, heads=4) < 0.5 * attention(A100, 4096, heads=64)


def test_torchs_copy_of_flash_attention_is_slower_backward():
    def seconds(kernel, sequence, backward):
        return H100.attention_s(1e12, sequence, 128, "bf16", backward=backward, kernel=kernel)

    assert seconds("torch_flash2", 4096, False) == seconds("flash2", 4096, False)
    slower = [seconds("torch_flash2", n, True) / seconds("flash2", n, True) for n in (512, 4096, 32768)]
    assert slower == sorted(slower, reverse=True)
    assert 1.05 < slower[-1] < slower[0] < 1.6


def test_a_held_product_writes_half_of_its_output_beside_nothing_on_hopper():
    m, n, k = 16384, 8192, 4096
    held_s = 2.0 * m * n * k / H100.reach("bf16").sustained
    written_s = 2.0 * m * n / H100.device.memory_bandwidth_bytes_per_s
    assert H100.product_s(1, m, n, k, "bf16") == pytest.approx(held_s + 0.5 * written_s)
    a100 = Gpu(find("A100-SXM-80GB").device)  # whose kernels write each tile before the next
    assert a100.product_s(1, m, n, 4 * k, "bf16") == pytest.approx(8.0 * m * n * k / a100.reach("bf16").sustained)


def test_sums_in_fp32_cost_hopper_alone():
    assert H100.fp32_sums == 1.05
    assert Gpu(find("B200").device).fp32_sums == Gpu(find("A100").device).fp32_sums == 1.0


def test_recent_is_torchs_choice_with_a_newer_cudnn():
    def seconds(gpu, kernel, precision="bf16"):
        return gpu.attention_s(1e12, 4096, 128, precision, backward=False, kernel=kernel)

    assert seconds(H100, "recent") == seconds(H100, "cudnn_9_19") < 0.9 * seconds(H100, "cudnn")
    assert seconds(H100, None) == seconds(H100, "cudnn")
    a100 = Gpu(find("A100").device)
    assert seconds(a100, "recent") == seconds(a100, "flash2")  # torch takes no cuDNN there
    assert seconds(H100, "recent", "fp32") == seconds(H100, None, "fp32")


def test_attention_takes_the_kernel_that_torch_takes():
    takes = {
        name: Gpu(find(name).device).torch_kernel("bf16", 128) for name in ("A100", "H100", "B200", "V100", "MI300X")
    }
    assert takes == {"A100": "flash2", "H100": "cudnn", "B200": "cudnn", "V100": "flash1", "MI300X": "flash2"}
    # cuDNN takes no head of a width that is no multiple of 8, FlashAttention none of more than 256.
    assert [H100.torch_kernel("bf16", width) for width in (100, 192, 256, 320)] == [
        "flash2",
        "cudnn",
        "cudnn",
        "flash1",
    ]
    assert H100.torch_kernel("fp32", 128) == A100.torch_kernel("fp32", 128) == "flash1"
    assert attention(H100, 8192) == attention(H100, 8192, kernel="cudnn") > 1.4 * attention(H100, 8192, kernel="flash2")
    # A kernel for Hopper makes no more of Blackwell's SMs than of its own.
    assert attention(B200, 8192, kernel="flash2") < 1.25 * attention(H100, 8192, kernel="flash2")


def test_values_narrower_than_queries_save_nothing():
    narrow, padded = (
        A100.attention_s(flops, 4096, 192, "bf16", backward=False, value_dim=v)
        for flops, v in ((1e12 * 320 / 384, 128), (1e12, 192))
    )
    assert narrow == pytest.approx(padded)


def test_element_wise_kernels_start_stream_and_fit_in_the_cache():
    shares, start_s = constants()["element_wise"]["share"], constants()["element_wise"]["start_s"]
    assert A100.element_wise_s(2.039e9) == pytest.approx(start_s + 1e-3 / shares["stream"])
    assert A100.element_wise_s(1) == pytest.approx(start_s, rel=1e-3)
    assert A100.element_wise_s(0) == 0.0
    # 40 MiB of cache: half of it holds what a kernel reads and writes.
    small, large = ((A100.element_wise_s(n) - start_s) / n for n in (10 * 2**20, 80 * 2**20))
    assert large / small == pytest.approx(constants()["element_wise"]["cache_speedup"])
    times = [A100.element_wise_s(n * 2**20) for n in range(5, 60)]
    assert times == sorted(times)
    assert A100.element_wise_s(1e9) < A100.element_wise_s(1e9, kind="norm") < A100.element_wise_s(1e9, kind="gather")


def test_kinds_of_traced_operators():
    assert kind_of("aten._softmax_backward_data") == kind_of("aten.native_layer_norm") == "norm"
    assert kind_of("aten.embedding_dense_backward") == "gather"
    assert kind_of("aten._log_softmax") == "log_softmax"
    assert kind_of("aten._log_softmax_backward_data") == "log_softmax_backward"
    assert kind_of("aten.add") == kind_of("aten._to_copy") == kind_of("aten.silu") == "stream"


def test_rates_use_the_catalogue_until_something_was_measured():
    device = make_cluster().groups[0].device
    catalogue, gpu = Rates(device, None, 8), Gpu(device)
    assert catalogue.matmul_s(1, 512, 512, 512, "bf16") == gpu.product_s(1, 512, 512, 512, "bf16")
    assert catalogue.element_wise_s(1e8, 0, "bfloat16", kind="norm") == gpu.element_wise_s(1e8, kind="norm")
    assert catalogue.grouped_s(4, 64, 64, 64, "bf16") == gpu.grouped_s(4, 64, 64, 64, "bf16")
    assert catalogue.attention_s(1e12, 2048, 64, "bf16", backward=True) == gpu.attention_s(
        1e12, 2048, 64, "bf16", backward=True
    )
    streamed = Rates(device, Measurements(memory=(MemorySample(workers=8, bytes_per_s=5e11),)), 8)
    assert streamed.element_wise_s(1e8, 0, "bfloat16") == pytest.approx(1e8 / 5e11)
    added = ElementWiseSample(kind="add", elements=10**6, dtype="bf16", workers=8, seconds=1e-4)
    assert Rates(device, Measurements(element_wise=(added,)), 8).element_wise_s(6e6, 0, "bfloat16") == pytest.approx(
        1e-4
    )


def test_a_processor_that_nobody_measured_is_priced_by_shares():
    cpu = make_cluster(name="cpu").groups[0].device
    assert Rates(cpu, None, 8).matmul_s(1, 64, 64, 256, "fp32") == pytest.approx(2 * 64 * 64 * 256 / (2e13 * 0.8 / 2))
    assert Rates(cpu, None, 8).element_wise_s(1e8, 0, "float32") == pytest.approx(1e8 / (0.8 * 1e12))


def test_the_benchmark_prices_every_kind_of_row(tmp_path):
    """Rows that are the forecast itself have no error; one of a device that nobody knows is counted apart."""
    gpu = Gpu(find("A100-PCIe-80GB").device)
    product_s = gpu.product_s(1, 4096, 1024, 8192, "bf16", output_bytes=4, accumulate=True)
    group_s = gpu.grouped_s(8, 512, 3072, 1024, "bf16")
    attention_s = gpu.attention_s(2.0 * 4096**2 * 16 * 128, 4096, 128, "bf16", backward=False)
    shapes = {
        ("matmul", "b=1, m=4096, k=8192, n=1024, layout=NT, accumulate=True, out_dtype=fp32"): (
            2 * 4096 * 8192 * 1024 / product_s
        ),
        ("group_matmul", "ng=8, M=512, N=3072, K=1024, out_dtype=bf16, stage=fwd, accumulate=False"): (
            2 * 8 * 512 * 3072 * 1024 / group_s
        ),
        ("sdp_fwd", "batch=1, seq_len=4096, head_num=16, kv_head_num=16, qk_head_dim=128, v_head_dim=128"): (
            4 * 4096**2 * 16 * 128 / attention_s
        ),
    }
    rows = [
        {"id": f"own-{kind}", "accelerator": "A100-PCIe", "kind": f"per_shape_{kind}", "shape": shape}
        | {"efficiency": rate / 312e12, "theory_tflops": 312}
        for (kind, shape), rate in shapes.items()
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([*rows, {**rows[0], "id": "other", "accelerator": "Abacus"}]))
    script = ROOT / "benchmarks" / "kernels.py"
    command = [sys.executable, str(script), str(file), "--worst", "9999"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "1 rows of other kinds or devices" in result.stdout
    own = [line for line in result.stdout.splitlines() if "own-" in line]
    assert len(own) == 3
    assert all(line.strip().startswith(("+0%", "-0%")) for line in own)
    # The published bars on H100, which come with the script.
    published = [
        line.split()
        for line in result.stdout.splitlines()
        if line.startswith("H100") and " all " in line and "own " not in line
    ]
    assert [int(line[-5]) for line in published] == [96, 48]  # what constants are derived from, and what they are not
    assert all(float(line[-4].rstrip("%")) < limit for line, limit in zip(published, (7, 10), strict=True))


def test_attention_of_an_unmeasured_part_reaches_less_of_its_peak_as_its_products_do():
    # Long sequences, so that only the rate counts: FlashAttention-2's of Ampere, by what products reach on MI250X and on A100.
    a100, mi250x, sizes = Gpu(find("A100").device), Gpu(find("MI250X").device), (1e15, 65536, 128, "bf16")
    slower = mi250x.attention_s(*sizes, backward=True) / a100.attention_s(*sizes, backward=True)
    products = a100.reach("bf16").burst / mi250x.reach("bf16").burst
    assert slower == pytest.approx(products, rel=0.15)


@pytest.mark.parametrize(
    ("backward", "measured"), [(False, (353.2, 355.5, 339.6, 309.6)), (True, (194.4, 202.1, 205.4, 206.7))]
)
def test_attention_on_mi300x_is_near_what_its_library_reaches(backward, measured):
    # ROCm/flash-attention issue 142: 1, 2, 4 and 8 sequences of 16384 tokens, 16 heads of 128. The backward share comes from it.
    for sequences, tflops in zip((1, 2, 4, 8), measured, strict=True):
        flops = (2.5 if backward else 1.0) * 4.0 * sequences * 16384**2 * 2048
        seconds = Gpu(find("MI300X").device).attention_s(flops, 16384, 128, "bf16", backward=backward, causal=False)
        assert flops / seconds == pytest.approx(tflops * 1e12, rel=0.05 if backward else 0.15)


@pytest.mark.parametrize(
    ("causal", "backward", "measured"),
    [(False, False, 1283), (True, False, 1247), (False, True, 1201), (True, True, 1109)],
)
def test_attention_on_mi355x_is_near_what_aiter_reaches(causal, backward, measured):
    # HazyResearch/HipKittens f09e9685, analysis/attn, mi355x_mha: 16 sequences of 16384 tokens, 16 heads of 128. No constant is derived from it.
    flops = (2.5 if backward else 1.0) * 4.0 * 16 * 16384**2 * 2048 * (0.5 if causal else 1.0)
    seconds = Gpu(find("MI355X").device).attention_s(flops, 16384, 128, "bf16", backward=backward, causal=causal)
    assert flops / seconds == pytest.approx(measured * 1e12, rel=0.25)
