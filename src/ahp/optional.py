"""Types of command-line options that may be left out.

tyro checks the default of what is written ``str | None`` with typeguard, whose import takes a thirtieth of a first answer; of these it does not
(tyro 1.0.17, ``_resolver.is_instance``).
"""

from typing import Optional

OptionalText = Optional[str]  # noqa: UP045
OptionalNumber = Optional[int]  # noqa: UP045
