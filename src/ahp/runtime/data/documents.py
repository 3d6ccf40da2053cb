"""Rows of a data set: plain text, a prompt and its completion, or a conversation; and which parts are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ahp.errors import BadInput
from ahp.violations import shortened


class Piece(NamedTuple):
    """A part of a document."""

    text: str
    scored: bool
    """Whether the model is trained to write the piece; otherwise it only reads it."""


@dataclass(frozen=True)
class Document:
    """Pieces in order, tokenized one by one."""

    pieces: tuple[Piece, ...]
    source_bytes: float
    """Its share of the bytes of the source, for a progress bar."""
    ended: bool = False
    """Whether its text has its own end, as from a chat template; otherwise the end-of-text token follows, and is scored."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class NotWritten(BadInput):
    """A conversation that the chat template does not write; ``documents_of`` adds its place."""


Template = Callable[[list[dict[str, Any]], bool], str]
"""(messages, whether to add the opening of an answer) -> the conversation as text. Raises NotWritten, and BadInput if there is no template."""

SHAPES = "a key text, the keys prompt and completion, or a key messages (a list of role and content)"


def documents_of(
    row: object, where: str, source_bytes: float, template: Template, field: str | None, key: str = "job.data"
) -> Iterator[Document]:
    """The documents of one row of .jsonl, .parquet or a hub's data set; a row without any text gives none.

    ``field`` is the key to read, None = whichever of the known shapes the row has; ``where`` names the row in errors,
    ``key`` is the user's key of the text.
    Raises BadInput for a row of no known shape.
    """
    if not isinstance(row, Mapping):
        raise BadInput(f"{key}: {where}: an object with {SHAPES} was expected, not a {type(row).__name__}")
    if field is not None and field not in row:
        raise BadInput(f"job.data_field = {field!r}: {where} has no such key (valid: {', '.join(map(str, row))})")
    try:
        for pieces, ended in _shaped(row, where, template, field, key):
            if any(piece.text.strip() for piece in pieces):
                yield Document(tuple(pieces), source_bytes, ended)
                source_bytes = 0.0
    except NotWritten as error:
        raise BadInput(f"{key}: {where}: {error}") from None


def _shaped(
    row: Mapping[str, Any], where: str, template: Template, field: str | None, key: str
) -> Iterable[tuple[list[Piece], bool]]:
    value = row.get(field or ("messages" if "messages" in row else "text"))
    if isinstance(value, list):
        return ((pieces, True) for pieces in conversation(_messages(value, where, key), template))
    if field is None and "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [([Piece(prompt, False), Piece(completion, True)], False)]
        if isinstance(prompt, list) and isinstance(completion, list):
            messages = _messages([*prompt, *completion], where, key)
            return ((pieces, True) for pieces in conversation(messages, template, first=len(prompt)))
    if isinstance(value, str):
        return [([Piece(value, True)], False)]
    expected = SHAPES if field is None else f"a text or a list of messages in {field}"
    keys = ", ".join(f"{name} ({_kind(value)})" for name, value in row.items()) or "none"
    raise BadInput(f"{key}: {where}: {expected} was expected (its keys: {keys})")


def _kind(value: Any) -> str:
    """What a value is, in JSON's words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case _:
            return "a list" if isinstance(value, list) else "an object"


def _messages(value: list[Any], where: str, key: str) -> list[dict[str, Any]]:
    for message in value:
        whole = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if (
            not whole or not {"content", "tool_calls"} & message.keys()
        ):  # a template writes an absent content as nothing
            rule = "every message needs a role, and a content or tool_calls"
            raise BadInput(f"{key}: {where}: {rule}; this one is {shortened(message)}")
    return [dict(message) for message in value]


def conversation(messages: list[dict[str, Any]], template: Template, first: int = 0) -> Iterator[list[Piece]]:
    """The conversation as the template writes it, with the assistant's answers scored, each up to the end of its turn.

    Answers before message ``first`` are not scored. If the template changes an earlier turn once the conversation has gone
    on (e.g. drops the reasoning), each answer becomes a document of its own after what precedes it, as the model sees it
    when it answers. An empty conversation has no pieces. Raises NotWritten.
    """
    if not messages:
        return
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    if answers and answers[0] == 0:  # there is no conversation before it that a template could open an answer to
        raise NotWritten(
            "the conversation begins with an answer of the role assistant (valid: a message of another role before it)"
        )
    spans = [(template(messages[:i], True), template(messages[: i + 1], False)) for i in answers]
    for opened, closed in spans:
        if not closed.startswith(opened):
            raise NotWritten(
                f"the tokenizer's chat template opens an answer otherwise than it writes one "
                f"({opened[-40:]!r} is not how {closed[-80:]!r} begins), so it cannot be told what to score"
            )
    whole = template(messages, False)
    if any(not whole.startswith(closed) for _, closed in spans):
        yield from ([Piece(opened, False), Piece(closed[len(opened) :], True)] for opened, closed in spans)
        return
    pieces, done = [], 0
    for opened, closed in spans:
        pieces += [Piece(whole[done : len(opened)], False), Piece(whole[len(opened) : len(closed)], True)]
        done = len(closed)
    yield [piece for piece in (*pieces, Piece(whole[done:], False)) if piece.text]
