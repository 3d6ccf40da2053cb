"""Random numbers by index: an element's number depends only on a key and the element's index, not on earlier draws.

So any part of a tensor can be drawn alone, on any device, with the values that it has in the whole. torch's generators cannot do that:
the CPU's is a sequence, and CUDA's numbers depend on how many processors a GPU has.

The bits are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), whose
n-th output is a hash of ``key + n * GAMMA``. Everything is in 64 bits, so that differences in rounding between devices are lost when
the result is rounded to 32.
"""

from __future__ import annotations

import torch

GAMMA = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The shift and the factor of each round of the hash."""
LAST_SHIFT = 31
BELOW_ONE = 1 - 2.0**-53
"""The largest float64 below 1, at which the normal quantile is still finite: 8.2."""


def uniform(index: torch.Tensor, key: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """For each int64 index a float64 above ``low`` and below ``high``."""
    return _symmetric(index, key).mul_((high - low) / 2).add_((high + low) / 2)


def normal(index: torch.Tensor, key: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """For each int64 index a float64 of the normal distribution: its quantile at a uniform number."""
    return _symmetric(index, key).erfinv_().mul_(std * 2**0.5).add_(mean)


def _symmetric(index: torch.Tensor, key: int) -> torch.Tensor:
    """Uniform between -1 and 1, float64."""
    return _bits(index, key).to(torch.float64).mul_(BELOW_ONE * 2.0**-63)


def _bits(index: torch.Tensor, key: int) -> torch.Tensor:
    """64 random bits for each index; products wrap around, as int64 does on every device."""
    value = index * _signed(GAMMA)
    value += _signed(key)
    shifted = torch.empty_like(value)
    for shift, factor in ROUNDS:
        value ^= _shifted(value, shift, shifted)
        value *= _signed(factor)
    value ^= _shifted(value, LAST_SHIFT, shifted)
    return value


def _shifted(value: torch.Tensor, shift: int, out: torch.Tensor) -> torch.Tensor:
    """Shift right, with zeros from the left: torch's own shift repeats the sign."""
    torch.bitwise_right_shift(value, shift, out=out)
    out &= (1 << (64 - shift)) - 1
    return out


def _signed(word: int) -> int:
    """The int64 that has these 64 bits."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
