"""Quantities read the same everywhere."""

from __future__ import annotations

import pytest

from ahp import words

GIB = 2**30


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (6.5712, "6.57 s"),
        (6.0, "6.00 s"),
        (0.9999, "1.00 s"),
        (123.4, "123 s"),
        (0.0123, "12.3 ms"),
        (1.5e-5, "15.0 us"),
        (12345.6, "12,346 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(60.0, "60.0 s"), (600.0, "10.0 min"), (77_000.0, "21.4 h"), (1.7e6, "19.7 days"), (1e7, "116 days")],
)
def test_duration(value: float, text: str) -> None:
    assert words.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.084, "8.4 %"), (0.0994, "9.9 %"), (0.0999, "10 %"), (0.1, "10 %"), (0.523, "52 %"), (1.125, "112 %")],
)
def test_percent(value: float, text: str) -> None:
    assert words.percent(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.2, "20 % faster than"), (-0.0001, "as fast as"), (-0.05, "5.0 % slower than")]
)
def test_compared(share: float, text: str) -> None:
    assert words.compared(share, "faster than", "slower than", "as fast as") == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.12, "12 % slower"), (0.95, "5.0 % faster"), (1.0, "0.0 % slower"), (2.0, "100 % slower"),
        (2.04, "2 times as long"), (2.36, "2.4 times as long"), (9.96, "10 times as long"), (19.13, "19 times as long"), (1234.5, "1,234 times as long"),
    ],
)  # fmt: skip
def test_slower(ratio: float, text: str) -> None:
    assert words.slower(ratio) == text


def test_number_of() -> None:
    assert [words.number_of(number, "worker") for number in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]


@pytest.mark.parametrize(("value", "text"), [(8.03e9, "8.03 B"), (124e6, "124 M"), (999_999, "1 M"), (12, "12")])
def test_count(value: float, text: str) -> None:
    assert words.count(value) == text


def test_bytes() -> None:
    assert words.gib(91.24 * GIB) == "91.2 GiB"
    assert words.gib(5 * 2**20) == "5 MiB"
    assert words.of_gib(61.26 * GIB, 80 * GIB) == "61.3 of 80.0 GiB"
    assert words.of_gib(0.5 * GIB, 4 * GIB) == "0.50 of 4.00 GiB"


def test_parts() -> None:
    assert words.part_words("bubble") == "pipeline bubble"
    assert words.part_words("gradient_reduce") == "exposed gradient reduction"
    assert words.part_words("optimizer_states") == "optimizer states"
