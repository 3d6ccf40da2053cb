"""``ahp train`` with the engine of config.yaml: what is asked for is what the workers run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from ahp.cli import main
from ahp.plan import EngineChoice, Plan
from ahp.runtime.device_limits import CPU_COMPILERS
from ahp.runtime.run.folder import RunFolder
from tests.search.small import cpu_workers

LOSSES = 3
MODEL = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def losses(tmp_path: Path, name: str, *engine: str) -> list[float]:
    folder, cluster = tmp_path / name, tmp_path / "cluster.yaml"
    cpu_workers(1, 1).save(cluster)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{number} times {number} is {number * number}" for number in range(500)))
    config = {
        "model": MODEL,
        "cluster": str(cluster),
        "job": {"data": str(text), "sequence_length": 32, "global_batch_size": 4, "steps": LOSSES, "precision": "fp32"},
        "parallelism": {"micro_batch_size": 2},
        "run": {"folder": str(folder)},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main.main(["train", str(tmp_path / "config.yaml"), "--run.sample", "false", *engine]) == 0
    return [record["loss"] for record in RunFolder(folder).metrics()]


COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, CPU_COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU"
)


@pytest.mark.usefixtures("launched_on_pool")
@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=[pytest.mark.wide, COMPILER])],
    ids=["eager", "compiled"],
)
def test_what_the_engine_is_asked_for_trains_as_the_default(tmp_path: Path, compiled: bool) -> None:
    asked = ["--engine.compile"] if compiled else []
    found = losses(tmp_path, "asked", *asked, "--engine.loss_chunk_tokens", "40")
    assert Plan.load(tmp_path / "asked").engine == EngineChoice(compile=compiled, loss_chunk_tokens=40)
    plain = losses(tmp_path, "plain")
    assert Plan.load(tmp_path / "plain").engine == EngineChoice(compile=False)
    assert len(plain) == LOSSES
    assert found == pytest.approx(plain, rel=1e-5)
