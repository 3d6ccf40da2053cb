"""The weights of a run that was stopped: read from its checkpoint without what the optimizer keeps."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from ahp.errors import BadInput
from ahp.graph.models import build_model
from ahp.plan import Plan, validated
from ahp.runtime.data import tokenizer as tokenizers
from ahp.runtime.data.tokenizer import opened
from ahp.runtime.files import crc32
from ahp.runtime.parallel import parallelize
from ahp.runtime.run import export_mark, exported
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.torch_compat import local_tensor
from ahp.runtime.weights import checkpoint
from tests.runtime.run.test_trainer import MODEL


def stopped_run(path: Path, optimizer: str) -> tuple[RunFolder, Plan, dict[str, torch.Tensor]]:
    """A run with one checkpoint, of its first step, and the weights that it has."""
    job = {"sequence_length": 16, "global_batch_size": 2, "steps": 4, "optimizer": {"name": optimizer}}
    plan = validated(Plan, {"model": MODEL, "job": job, "parallelism": {}}, "plan")
    run = RunFolder(path)
    run.create()
    tokenizers.train(["def call(x): return x + 1\n" * 9], 300).save(str(run.tokenizer_file))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = parallelize(build_model(plan.model, device="meta"), plan, device="cpu")
        ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
        parallel.step(parallel.shard({"input_ids": ids, "labels": ids}))
        aside = run.open_checkpoint(1)
        parallel.save(aside)
        meta = {"crc32": {file.name: crc32(file) for file in aside.iterdir()}, "job": job, "model": MODEL}
        meta["tokenizer_crc32"] = crc32(run.tokenizer_file)
        run.commit_checkpoint(1, meta, keep=1)
        return run, plan, {name: local_tensor(p.detach()).clone() for name, p in parallel.parameters.items()}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("when", ["checked", "read"])
def test_a_checkpoint_that_the_run_removes_while_it_is_read_gives_way_to_the_newer_one(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ahp generate beside the run said that the folder was no checkpoint, or that its newest one was damaged."""
    run, plan, _ = stopped_run(tmp_path / "run", "adamw")
    older = run.checkpoints()[-1]

    def go_on() -> None:
        if older.path.exists():
            meta = {key: older.meta()[key] for key in ("crc32", "job", "model", "tokenizer_crc32")}
            aside = run.open_checkpoint(2)
            for name in meta["crc32"]:
                shutil.copyfile(older.path / name, aside / name)
            run.commit_checkpoint(2, meta, keep=1)

    load = checkpoint.dcp.load

    def checked(file: Path) -> int:
        go_on()
        return crc32(file)

    def read(*arguments: Any, **more: Any) -> None:
        go_on()
        load(*arguments, **more)

    if when == "checked":
        monkeypatch.setattr("ahp.runtime.run.folder.crc32", checked)
    else:
        monkeypatch.setattr(checkpoint.dcp, "load", read)
    assert exported.newest(run, plan) == run.weights_folder
    assert run.exported_step() == 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stopped_run_gives_its_weights_without_optimizer_states(
    tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read AdamW's moments too: three times the memory of the weights."""
    run, plan, weights = stopped_run(tmp_path / "run", optimizer)
    read: list[str] = []
    load = checkpoint.dcp.load

    def watched(tensors: dict[str, Any], **more: Any) -> None:
        read.extend(tensors)
        load(tensors, **more)

    monkeypatch.setattr(checkpoint.dcp, "load", watched)
    folder = exported.newest(run, plan)
    assert {name.split(".")[0] for name in read} == {"model"}
    assert run.exported_step() == 1
    stored = load_file(folder / "model.safetensors")
    assert set(stored) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight.to(stored[name].dtype))


def test_a_stopped_run_whose_folder_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as another user's. ahp generate said "runs/demo/hf.tmp-4ikwthqr: Read-only file system" with the exit code of AHP's own faults."""
    run, plan, _ = stopped_run(tmp_path / "run", "adamw")

    def refuses(**_: Any) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(exported.tempfile, "mkdtemp", refuses)
    with pytest.raises(
        BadInput, match=r"run = '.*run': it was stopped, .* cannot be written \(Read-only file system\)"
    ):
        exported.newest(run, plan)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_exported_files_that_are_damaged_are_written_again_from_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were used: a flipped bit is another weight."""
    run, plan, _ = stopped_run(tmp_path / "run", "adamw")
    folder = exported.newest(run, plan)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "ahp.json"} < whole.keys()
    for name in whole:
        for damage in (flip_a_bit, Path.unlink):
            damage(folder / name)
            exported.newest(run, plan)
            assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole, (name, damage)
            assert name == "ahp.json" or f"{folder / name} is missing or has changed" in capsys.readouterr().err
    assert (run.path / "hf.damaged").is_dir()
    export_mark.write(folder, 2, {})  # of a later step than the checkpoint
    flip_a_bit(folder / "config.json")
    with pytest.raises(BadInput, match=r"config\.json is missing or has changed.*no checkpoint is left"):
        exported.newest(run, plan)
    shutil.rmtree(run.checkpoints_folder)
    flip_a_bit(folder / "config.json")
    flip_a_bit(folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"model\.safetensors is missing or has changed.*no checkpoint is left"):
        exported.newest(run, plan)
    assert folder.is_dir()


def test_a_tokenizer_that_is_damaged_is_refused(tmp_path: Path) -> None:
    run, plan, _ = stopped_run(tmp_path / "run", "adamw")
    flip_a_bit(run.tokenizer_file)
    for damage in (lambda file: None, Path.unlink):
        damage(run.tokenizer_file)
        with pytest.raises(
            BadInput, match=r"tokenizer\.json is missing or has changed since it was written; let the run"
        ):
            exported.newest(run, plan)
    run.tokenizer_file.write_text("{")
    with pytest.raises(BadInput, match=r"tokenizer = .*not a tokenizer\.json"):
        opened(run.tokenizer_file)


def test_a_run_whose_checkpoint_is_damaged_is_not_told_to_have_none_yet(tmp_path: Path) -> None:
    run, plan, _ = stopped_run(tmp_path / "run", "adamw")
    flip_a_bit(run.checkpoints()[0].path / "meta.json")
    with pytest.raises(BadInput, match=r"no checkpoint of the run is whole \(step-1: meta\.json"):
        exported.newest(run, plan)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan, _ = stopped_run(tmp_path / "run", "adamw")
    monkeypatch.setattr(exported, "memory_available_bytes", lambda: 1000)
    monkeypatch.setattr(checkpoint.dcp, "load", lambda *args, **more: pytest.fail("weights were read"))
    with pytest.raises(BadInput, match=r"weights: in fp32 they take 0 MiB, and this machine has 0 MiB free"):
        exported.newest(run, plan)
    assert not list(run.path.glob("hf*")), "a folder is left behind"
