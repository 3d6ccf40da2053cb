"""Predicted against measured kernel times on GPUs, and where the forecast's kernel constants come from.

    python benchmarks/kernels.py FILE                   # FILE: a JSON list of measured kernels (mamf.json)
    python benchmarks/kernels.py FILE --worst 10        # and the kernels that are furthest off
    python benchmarks/kernels.py FILE --derive          # the constants of kernels.yaml, computed again
    python benchmarks/kernels.py FILE --leave-one-out   # each device judged by constants derived without it
    python benchmarks/kernels.py FILE --markdown docs/forecast/kernels.md   # both errors into that page

Rows whose ``kind`` starts with ``per_shape_`` are one kernel each with its shape; ``max_achievable_matmul`` is the best
product of a device, compared with the burst rate. The bars of attention_h100.yaml are added, what attention_unseen.yaml has,
which nothing is derived from, and what gpu_kernels.py measured on an H100 and an H200 (kernels_h100.json, kernels_h200.json). An error is predicted time /
measured time - 1. A product that takes over a millisecond has the power controller's answer in it, a shorter one has not;
a training step has, and so has the forecast, so that the short ones of B200 come out slower than measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import page
import yaml
from kernel_rows import LARGEST, OWN, UNSEEN, Row, rows_of

from ahp.cluster.catalogue import find
from ahp.forecast.gpu import Gpu, constants

MARKER = "kernels"
"""Of the table in a page."""

HOST_BOUND_S = 130.0e-6
"""Attention on B200 that is shorter took as long as the host needed to launch it: left out of the derivation."""

LIMITS = {"exponentials": 5.0, "prologue_keys": 600.0, "diagonal_keys": 200.0, "tail": 2.0}
"""How far the derivation of attention's constants may go."""

Constants = dict[str, Any]


def errors(rows: Iterable[Row], data: Constants) -> list[tuple[Row, float]]:
    """Each row and its error."""
    momentary = {**data, "devices": [{**e, "half": e["half"][:1]} for e in data["devices"]]}
    gpus: dict[tuple[str, bool], Gpu] = {}
    found = []
    for row in rows:
        key = row.device, row.kind == LARGEST
        if key not in gpus:
            gpus[key] = Gpu(find(row.device).device, momentary if key[1] else data)
        found.append((row, row.predict(gpus[key]) / row.seconds - 1))
    return found


def table(judged: list[tuple[Row, float]]) -> str:
    """Mean, median, worst and bias by device, kind and detail."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, error in judged:
        groups[row.device, row.kind, "all"].append(error)
        groups[row.device, row.kind, row.detail].append(error)
    lines = [
        f"{'device':16s} {'kernel':16s} {'':26s} {'rows':>4s} {'mean':>6s} {'median':>6s} {'worst':>6s} {'bias':>6s}"
    ]
    for (device, kind, detail), values in sorted(groups.items()):
        e = np.array(values)
        worst = e[np.argmax(abs(e))]
        lines.append(
            f"{device:16s} {kind:16s} {detail:26s} {len(e):4d} {abs(e).mean():6.1%} {np.median(abs(e)):6.1%} "
            f"{worst:+6.0%} {e.mean():+6.1%}"
        )
    return "\n".join(lines)


def derive(rows: Sequence[Row], base: Constants, *, without: str | None = None) -> Constants:
    """The derived constants from the rows of every device but ``without``, which keeps what other sources say of it."""
    data = copy.deepcopy(base)
    used = [row for row in rows if row.device != without]
    _derive_products(used, data, without)
    _derive_attention(rows, data, without)
    # The least per expert is a launch only where the experts' products are short, on B200.
    launches = [r.seconds / _groups_of(r) for r in used if r.kind == "grouped product" and r.device.startswith("B200")]
    data["groups"]["launch_s"] = min(launches, default=find("B200-SXM").device.kernel_launch_s)
    return data


def _derive_products(rows: Sequence[Row], data: Constants, without: str | None) -> None:
    """Three constants of shape, and the sustained rate of each device, from the long products (all of A100-PCIe's).

    The shape shows where power does not hide it, on A100-PCIe; without it the start of a tile and the operands' share come
    from B200, and nothing says what of the output is hidden: nothing.
    """
    names = ("tile_start_s", "operand_share", "output_share")
    products = [r for r in rows if r.kind == "product" and ("long" in r.detail or r.device.startswith("A100"))]
    shaping = [r for r in products if r.device.startswith("A100")]
    free = 3 if shaping else 2
    shaping = shaping or [r for r in rows if r.kind == "product"]
    device = shaping[0].device

    def put(values: Sequence[float]) -> None:
        found = (values[0] * 1e-6, *values[1:free], *(() if free == 3 else (1.0,)))
        data["products"].update(zip(names, found, strict=True))
        _put_share(data, device, values[-1])

    start = [data["products"][names[0]] * 1e6, *(data["products"][name] for name in names[1:free])]
    limits = [0.0] * free, [5.0, 0.9, 1.0][:free]
    _least_squares(shaping, data, [*start, _entry(data, device)["half"][1]], put, limits)
    for other in {r.device for r in products} - {device}:
        own = [r for r in products if r.device == other]
        _least_squares(
            own, data, [_entry(data, other)["half"][1]], lambda v, d=other: _put_share(data, d, v[0]), ([], [])
        )
    if without is not None and len(_entry(data, without)["half"]) > 1:
        _put_share(data, without, _from_relative(data, without))


def _from_relative(data: Constants, device: str) -> float:
    """The sustained share that the power law gives a device from the nearest of its generation with one of its own."""
    relative = {"A100-PCIe-80GB": "A100-SXM-80GB", "B200-SXM": "GB200-NVL72"}.get(device)
    if relative is None:
        return _entry(data, device)["half"][1]
    own, other = find(device).device, find(relative).device
    law = ((own.rated_power_w or 0.0) / (other.rated_power_w or 1.0)) ** data["power"]["exponent"]
    peaks = other.peak_flops_per_s["bf16"] / own.peak_flops_per_s["bf16"]
    return min(_entry(data, device)["half"][0], _entry(data, relative)["half"][1] * law * peaks)


def _derive_attention(rows: Sequence[Row], data: Constants, without: str | None) -> None:
    """Per phase: four constants that all devices share, and one share for each kernel and generation.

    A device left out has no part in the shared ones, and keeps its own share, fitted last with the rest held.
    """
    for backward, phase in enumerate(("forward", "backward")):
        constants_of = data["attention"][phase]
        names = [
            n for n in ("exponentials", "prologue_keys", "diagonal_keys", "tail") if not (backward and n[0] == "d")
        ]
        attention = [r for r in rows if r.share and r.share[2] == backward]
        usable = [r for r in attention if not r.device.startswith("B200") or r.seconds > HOST_BOUND_S]
        seen = [r for r in usable if r.device != without]
        shares = sorted({r.share[:2] for r in seen if r.share})

        def put(values: Sequence[float], target=constants_of, keys=names, kernels=shares, phase_index=backward) -> None:
            target.update(zip(keys, values[: len(keys)], strict=True))
            for (kernel, generation), value in zip(kernels, values[len(keys) :], strict=True):
                data["attention"]["product_share"][kernel][generation][phase_index] = value

        product_share = data["attention"]["product_share"]
        start = [constants_of[n] for n in names] + [product_share[k][g][backward] for k, g in shares]
        _least_squares(seen, data, start, put, ([0.0] * len(start), [LIMITS[name] for name in names]))
        left = [r for r in usable if r.device == without and r.share]
        for kernel, generation in {r.share[:2] for r in left if r.share}:
            own = [r for r in left if r.share and r.share[:2] == (kernel, generation)]
            target = product_share[kernel][generation]
            _least_squares(
                own, data, [target[backward]], lambda v, t=target, b=backward: t.__setitem__(b, v[0]), ([], [])
            )


def _least_squares(
    rows: Sequence[Row],
    data: Constants,
    start: Sequence[float],
    put: Callable[[Sequence[float]], None],
    bounds: tuple[list[float], list[float]],
) -> None:
    """Set the constants to where log(predicted / measured) is least; each group of rows (device, detail) has one vote."""
    from scipy.optimize import least_squares

    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        sizes[row.device, row.kind] += 1
    weight = np.array([1 / math.sqrt(sizes[row.device, row.kind]) for row in rows])

    def residuals(values: Sequence[float]) -> np.ndarray:
        put(list(values))
        return weight * np.log([1 + error for _, error in errors(rows, data)])

    low = bounds[0] + [0.05] * (len(start) - len(bounds[0]))
    high = bounds[1] + [1.5] * (len(start) - len(bounds[1]))
    inside = np.clip(start, np.array(low) + 1e-6, np.array(high) - 1e-6)
    found = least_squares(residuals, inside, loss="soft_l1", f_scale=0.05, diff_step=0.02, bounds=(low, high))
    put(list(found.x))


def _entry(data: Constants, device: str) -> dict[str, Any]:
    return next(e for e in data["devices"] if device.startswith(e["name"]))


def _put_share(data: Constants, device: str, share: float) -> None:
    _entry(data, device)["half"][1] = share


def _groups_of(row: Row) -> int:
    return int(row.id.split("ng=")[1].split("_")[0])


def derived_lines(data: Constants) -> str:
    """What was derived, as it stands in kernels.yaml."""
    picked = {
        "products": {n: data["products"][n] for n in ("tile_start_s", "operand_share", "output_share")},
        "groups": {"launch_s": data["groups"]["launch_s"]},
        "attention": {n: data["attention"][n] for n in ("forward", "backward", "product_share")},
        "devices": {d: _entry(data, d)["half"] for d in ("A100-PCIe-80GB", "B200-SXM")},
    }
    rounded = json.loads(json.dumps(picked), parse_float=lambda text: float(f"{float(text):.3g}"))
    return yaml.safe_dump(rounded, sort_keys=False, default_flow_style=None)


def leave_one_out(rows: Sequence[Row], data: Constants) -> list[tuple[Row, float]]:
    """Each device's rows judged by constants derived without it; those of one device alone derive nothing."""
    deriving = [r for r in rows if r.kind not in (LARGEST, UNSEEN) and not r.kind.startswith(OWN)]
    judged = []
    for device in sorted({r.device for r in deriving}):
        judged += errors([r for r in deriving if r.device == device], derive(rows, data, without=device))
    return judged


def side_by_side(judged: list[tuple[Row, float]], left_out: list[tuple[Row, float]]) -> str:
    """Both errors by device, kind and detail, as Markdown."""
    without = {row.id: error for row, error in left_out}
    groups: dict[tuple[str, str], list[tuple[float, float | None]]] = defaultdict(list)
    for row, error in judged:
        groups[row.device, f"{row.kind}, {row.detail}"].append((error, without.get(row.id)))
    lines = []
    for (device, kernel), found in sorted(groups.items()):
        own = np.array([error for error, _ in found])
        left = [abs(error) for _, error in found if error is not None]
        lines.append([
            f"{device}: {kernel}", str(len(own)), f"{100 * abs(own).mean():.1f}", f"{100 * np.median(abs(own)):.1f}",
            f"{100 * own[np.argmax(abs(own))]:+.0f}", f"{100 * own.mean():+.1f}", f"{100 * np.mean(left):.1f}" if left else "",
        ])  # fmt: skip
    return page.table(["device: kernel", "rows", "mean", "median", "worst", "bias", "left out"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON list of measured kernels")
    parser.add_argument("--worst", type=int, default=0, help="print so many kernels that are furthest off")
    parser.add_argument("--derive", action="store_true", help="compute the constants again and judge them")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="judge each device by constants derived without it"
    )
    parser.add_argument("--markdown", type=Path, help="write both errors into this page, between its markers")
    args = parser.parse_args()
    if args.markdown:
        page.require(args.markdown, MARKER)
    rows, skipped = rows_of(args.file)
    print(f"{len(rows)} kernels, {skipped} rows of other kinds or devices that the catalogue does not have")
    data = constants()
    if args.derive:
        data = derive(rows, data)
        print(derived_lines(data))
    judged = errors(rows, data)
    if args.markdown:
        page.write(args.markdown, MARKER, side_by_side(judged, leave_one_out(rows, data)))
    if args.leave_one_out:
        print("each device by constants derived from the others")
        judged = leave_one_out(rows, data)
    print(table(judged))
    for row, error in sorted(judged, key=lambda pair: -abs(pair[1]))[: args.worst]:
        print(f"{error:+5.0%} {row.device:16s} {1e6 * row.seconds:9.0f} us  {row.id}")


if __name__ == "__main__":
    main()
