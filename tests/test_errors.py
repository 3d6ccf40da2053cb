"""What errors say in one line."""

from ahp.errors import first_line


def test_the_first_line_of_an_error_without_a_message() -> None:
    assert first_line(RuntimeError("\n one \n two")) == "one "
    assert first_line(RuntimeError()) == first_line(RuntimeError(" \n")) == "no reason"
