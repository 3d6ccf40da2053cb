"""What errors say in one line."""

from ahp.errors import bad_input, first_line


def test_the_first_line_of_an_error_without_a_message() -> None:
    assert first_line(RuntimeError("\n one \n two")) == "one "
    assert first_line(RuntimeError()) == first_line(RuntimeError(" \n")) == "no reason"


def test_a_value_of_any_length_leaves_the_message_readable() -> None:
    assert len(str(bad_input("graph", "x" * 10_000, "must be a ModelGraph"))) < 600
