import pytest

from ahp.errors import BadInput
from ahp.plan import Parallelism
from ahp.schedule.stages import layer_ranges, layers_of_stages


@pytest.mark.parametrize(
    ("p", "v", "layers", "expected"),
    [
        (1, 1, 7, (7,)),
        (2, 1, 7, (4, 3)),
        (4, 1, 6, (1, 2, 2, 1)),
        (2, 2, 6, (1, 2, 2, 1)),
        (4, 1, 7, (2, 2, 2, 1)),
        (4, 1, 4, (1, 1, 1, 1)),
    ],
)
def test_as_even_as_can_be(p, v, layers, expected):
    parallelism = Parallelism(pipeline_parallel_degree=p, virtual_stages_per_rank=v)
    assert layers_of_stages(parallelism, layers) == expected


def test_the_ends_may_hold_no_layer_where_the_engine_says_so():
    parallelism = Parallelism(pipeline_parallel_degree=4, virtual_stages_per_rank=2)
    assert layers_of_stages(parallelism, 6, ends="may_be_empty") == (0, 1, 1, 1, 1, 1, 1, 0)
    assert layers_of_stages(parallelism, 7, ends="may_be_empty") == (0, 1, 1, 1, 1, 1, 1, 1)
    assert layers_of_stages(parallelism, 9, ends="may_be_empty") == layers_of_stages(parallelism, 9)


@pytest.mark.parametrize(
    ("stages", "layers", "expected"),
    [(8, 32, (4, 5, 4, 4, 4, 4, 4, 3)), (4, 27, (7, 7, 7, 6)), (8, 30, (3, 4, 4, 4, 4, 4, 4, 3)), (4, 2, (0, 1, 1, 0))],
)
def test_embedding_and_head_may_count_as_layers(stages, layers, expected):
    parallelism = Parallelism(pipeline_parallel_degree=stages)
    assert layers_of_stages(parallelism, layers, ends="count_as_layers") == expected


def test_given_layers_are_kept():
    parallelism = Parallelism(pipeline_parallel_degree=2, layers_per_stage=(5, 1))
    assert layers_of_stages(parallelism, 6) == (5, 1)
    with pytest.raises(BadInput, match=r"layers_per_stage.*sums to 6.*7 layers"):
        layers_of_stages(parallelism, 7)


def test_too_many_stages_names_the_valid_degrees():
    with pytest.raises(BadInput, match=r"pipeline_parallel_degree = 4.*3 layers.*valid: 1, 2, 3"):
        layers_of_stages(Parallelism(pipeline_parallel_degree=4), 3)


def test_ranges_cover_every_layer_once():
    assert [list(r) for r in layer_ranges((2, 1, 3))] == [[0, 1], [2], [3, 4, 5]]


def test_a_model_without_blocks_is_one_stage():
    assert layers_of_stages(Parallelism(), 0) == (0,)
