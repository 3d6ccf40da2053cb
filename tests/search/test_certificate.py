"""Three lines about a search: their counts add up, and they claim what the certificate does."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.search.method import Method
from ahp.search.mixed.over_groups import MixedCertificate
from ahp.search.ranking import search
from ahp.search.result import OwnOrder, Ranking

JOB = Job(sequence_length=1024, global_batch_size=16)


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return search(analyze("tiny", JOB), "1x4xH100-SXM-80GB", JOB)


def words(ranking: Ranking) -> tuple[str, str, str]:
    lines = [line.partition(": ") for line in ranking.proof]
    assert [lead for lead, _, _ in lines] == ["searched", "left out", "proven"]
    first, second, third = (line for _, _, line in lines)
    return first, second, third


def test_the_first_plan_keeps_them_after_what_it_takes(ranking: Ranking) -> None:
    assert ranking.best.why[1:4] == ranking.proof


def counts(line: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"(?:^|, )([\d,]+) ", line)]


def test_what_was_left_out_and_what_was_ranked_are_what_was_searched(ranking: Ranking) -> None:
    first, second, third = words(ranking)
    of = ranking.certificate
    assert counts(first)[0] == of.rows == sum(counts(second)) + of.fit
    assert "compiled and eager" in first
    assert "cannot be faster" in second
    assert third.startswith("nothing faster that fits was missed: the rest takes at least ")
    shown = third.split("at least ")[1].split(" ")[:2]
    assert of.lowest_bound_left_s is not None
    assert float(shown[0]) * {"s": 1.0, "ms": 1e-3}[shown[1].strip(";")] == pytest.approx(
        of.lowest_bound_left_s, rel=1e-2
    )


def test_what_is_not_proven_is_not_claimed(ranking: Ranking) -> None:
    of = ranking.certificate
    _, second, third = words(replace(ranking, certificate=replace(of, proven=False, lowest_bound_left_s=0.5)))
    assert "not looked at" in second
    assert "faster" not in second
    assert third == "nothing: a layout of 500 ms may be among those left out"
    _, _, open_cuts = words(replace(ranking, certificate=replace(of, any_cut_s=of.found_s / 2, any_part_s=of.found_s)))
    assert "; not proven: uneven pipeline stages (at least " in open_cuts
    assert "; no faster with other layers recomputed; " in open_cuts


def test_of_what_cannot_be_nothing_is_claimed_and_its_json_has_no_infinity() -> None:
    alone = search(analyze("tiny", JOB), "1xH100-SXM-80GB", JOB)
    assert alone.certificate.any_cut_s is None
    assert "pipeline stages" not in words(alone)[2]
    json.dumps(alone.certificate.plain(), allow_nan=False)


def test_a_solver_with_a_budget_proves_nothing() -> None:
    found = search(analyze("tiny", JOB), "1x4xH100-SXM-80GB", JOB, method=Method("anneal", budget=5))
    first, _, third = words(found)
    assert first.endswith("forecast in full by simulated annealing")
    assert third.startswith("nothing: a")
    assert third.endswith("--method exact proves its best")


def test_an_order_of_its_own_is_told_beside_the_proof(ranking: Ranking) -> None:
    own = OwnOrder(gain=0.02, gap=0.0, bound="", leads=True)
    assert words(replace(ranking, own_order=own))[2].endswith(own.words())


def test_several_groups_have_a_gap_or_a_proof(ranking: Ranking) -> None:
    of = {**vars(ranking.certificate), "any_cut_s": None, "any_part_s": None, "best_s": 2.0, "found_s": 2.0}
    open_ = {**of, "proven": False, "lowest_bound_left_s": 1.5}
    mixed = MixedCertificate(**open_, shapes=100, placed=7, unlike=3, any_widths_s=1.25)
    first, second, third = words(replace(ranking, certificate=mixed))
    assert first.startswith(f"100 shapes over 2 groups of devices and {mixed.rows - 100:,} layouts of one group alone")
    assert "faster" not in second
    assert (
        third
        == "the best is within 25 % of the optimum: no layout takes under 1.50 s; not proven: stages of unlike width (at least 1.25 s)"
    )
    assert words(replace(ranking, certificate=replace(mixed, any_widths_s=0.0)))[2].endswith("unlike width (no bound)")
    assert words(replace(ranking, certificate=replace(mixed, any_widths_s=2.0)))[2].endswith(
        "no layout takes under 1.50 s; no faster with stages of unlike width"
    )
    settled = replace(mixed, proven=True, unlike=0, any_widths_s=None)
    assert words(replace(ranking, certificate=settled))[2] == (
        "nothing faster that fits was missed: the rest takes at least 1.50 s"
    )
