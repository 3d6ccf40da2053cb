"""What every node of a run must have alike: the settings, the folder, the text and the model. A path can lead to other files on another node."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ahp.errors import BadInput
from ahp.plan import Plan
from ahp.runtime.ranks.preparation import Preparation
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.same_model import described, key_differences, model_differences
from ahp.runtime.run.texts import Texts, prepare_texts
from ahp.violations import shortened


def texts_on_all(workers: Preparation, plan: Plan, folder: RunFolder, prepare: Callable[[], Texts]) -> Texts:
    """The texts that the first worker prepares and verifies. A node without its cache, or with a damaged one, prepares them again.

    All workers call this. Raises BadInput on a node that has other text.
    """
    found = workers.decided_by_first(prepare, Texts)

    def seen() -> Texts:
        try:
            # One worker per node reads every byte; the first worker of all already has.
            found.check(verify=_speaks_for_another_node(workers))
        except BadInput:
            own = prepare_texts(plan, folder)
            _refuse_other_text(plan, own, found)
            return own
        return found

    return workers.done_by_all(seen)


def refuse_other_settings(workers: Preparation, asked: dict[str, Any]) -> None:
    """Raises BadInput on a node that was asked for something else than the first worker's; ``asked``: plain data. All workers call this.

    The first one's job would count without a word, and ranks that save or validate at other steps would wait for each other.
    """
    first = workers.decided_by_first(lambda: asked, dict[str, Any])

    def compare() -> None:
        if _speaks_for_another_node(workers) and (found := differences(first, asked)):
            raise BadInput(
                f"on {socket.gethostname()}: {found} (valid: the same command, files and versions on every node)"
            )

    workers.done_by_all(compare)


def differences(first: dict[str, Any], asked: dict[str, Any]) -> str:
    """The keys that differ from the first worker's, with both values; empty if none does."""
    return "; ".join(found.removeprefix(".") for found in key_differences(first, asked, ""))


def refuse_other_folders(workers: Preparation, folder: RunFolder) -> None:
    """Raises BadInput on a node where the run's folder is not the first worker's: its part of every checkpoint would be missing there. All
    workers call this; a second call with the same folder looks no more."""
    if folder.is_everyones:
        return
    mark = workers.decided_by_first(folder.leave_mark, str)

    def compare() -> None:
        if _speaks_for_another_node(workers) and not folder.has_mark(mark):
            raise BadInput(
                f"run.folder = {str(folder.path)!r}: on {socket.gethostname()} it is another folder than on the node of worker 0 (valid: a "
                "folder on storage that all nodes share)"
            )

    workers.done_by_all(compare)
    folder.is_everyones = True


def refuse_other_models(workers: Preparation, plan: Plan) -> None:
    """Raises BadInput on a node where the plan's model is another than on the first worker's. All workers call this."""
    first = workers.decided_by_first(lambda: described(plan.model), dict[str, Any])

    def compare() -> None:
        if _speaks_for_another_node(workers) and (found := list(model_differences(first, described(plan.model)))):
            raise BadInput(
                f"model = {shortened(plan.model)}: on {socket.gethostname()} it is another model than on the node of worker 0: {'; '.join(found)} "
                "(valid: the same files on every node)"
            )

    workers.done_by_all(compare)


def _speaks_for_another_node(workers: Preparation) -> bool:
    return not workers.is_first and os.environ.get("LOCAL_RANK", "0") == "0"


def _refuse_other_text(plan: Plan, own: Texts, first: Texts) -> None:
    """Entries of caches are named by what is in them."""
    named = [("job.data", *texts) for texts in zip(plan.job.texts, own.corpora, first.corpora, strict=True)]
    named.append(("job.validation", str(plan.job.validation), own.validation or "", first.validation or ""))
    for key, text, here, there in named:
        if Path(here).name != Path(there).name:
            raise BadInput(
                f"{key} = {text!r}: on {socket.gethostname()} it is other text, or has another tokenizer, than on the node of worker 0 "
                "(valid: the same files on every node)"
            )
