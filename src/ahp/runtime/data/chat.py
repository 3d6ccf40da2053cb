"""The chat template that came with a tokenizer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ahp.errors import BadInput, first_line
from ahp.runtime.data.documents import NotWritten, Template
from ahp.runtime.data.tokenizer import BESIDE


def template_beside(tokenizer_file: Path | None, key: str = "job.data") -> Template:
    """A function that writes conversations with the template in the tokenizer's folder, which is read at the first one.

    It raises BadInput if there is no template, and NotWritten if the template refuses a conversation; ``key``: the user's key of the text.
    """

    @cache
    def tokenizer() -> Any:
        if tokenizer_file is None or not has_template(tokenizer_file):
            where = "none" if tokenizer_file is None else str(tokenizer_file)
            raise BadInput(
                f"{key}: it holds conversations (messages), and the tokenizer ({where}) has no chat template; give a "
                "model's folder with tokenizer.json and a tokenizer_config.json or chat_template.jinja that has one, as "
                "init_from or model, or write the data as prompt and completion"
            )
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer_file.parent, local_files_only=True)

    def write(messages: list[dict[str, Any]], opens_answer: bool) -> str:
        written_by = tokenizer()
        try:
            return written_by.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens_answer)
        except Exception as error:  # a template is a program, and a message can hold anything
            roles = [message["role"] for message in messages]
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise NotWritten(f"the chat template refuses a conversation of {roles}: {reason}") from None

    return write


def has_template(tokenizer_file: Path) -> bool:
    """Whether a chat template lies next to a tokenizer.json."""
    folder = tokenizer_file.parent
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def fingerprint_beside(tokenizer_file: Path) -> bytes:
    """The files that decide how conversations are written, as bytes to hash."""
    found = (tokenizer_file.parent / name for name in BESIDE)
    return b"".join(file.name.encode() + file.read_bytes() for file in found if file.is_file())
