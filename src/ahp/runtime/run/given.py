"""A run's copy of its ``init_from`` folder, without the weights: once there is a checkpoint, the run no longer needs that folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TypeVar

from ahp.config import Config
from ahp.plan import Plan
from ahp.runtime.data.tokenizer import BESIDE
from ahp.runtime.run.folder import RunFolder

Asked = TypeVar("Asked", Plan, Config)
GENERATION = "generation_config.json"
"""transformers' name for the file of the settings with which text is generated."""

KEPT = ("config.json", GENERATION, "tokenizer.json", *BESIDE)


def keep(plan: Plan, run: RunFolder) -> None:
    """Copy the config and tokenizer files of ``init_from`` into the run's folder, before the first step."""
    if plan.init_from is None or run.checkpoints():
        return
    run.given_folder.mkdir(exist_ok=True)
    for name in KEPT:
        file = Path(plan.init_from).expanduser() / name
        if file.is_file():
            shutil.copyfile(file, run.given_folder / name)


def with_kept_model(asked: Asked, run: RunFolder) -> Asked:
    """``asked``, with the run's copy as its model if the model is the ``init_from`` folder and that folder is gone."""
    folder = asked.init_from
    if folder is None or asked.model != folder or Path(folder).expanduser().is_dir() or not run.checkpoints():
        return asked
    return asked.model_copy(update={"model": str(run.given_folder)}) if run.given_folder.is_dir() else asked


def named_model(model: object, init_from: str | None, run: RunFolder) -> object:
    """The user's own name for a model (``init_from``) if it is the run's copy; otherwise the model itself."""
    is_kept = init_from is not None and isinstance(model, str) and Path(model).name == run.given_folder.name
    return init_from if is_kept else model
