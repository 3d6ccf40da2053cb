"""Types of command-line options that can be left out.

tyro checks the default of a ``str | None`` with typeguard, whose import takes a thirtieth of a first answer; for these types it does not
(tyro 1.0.17, ``_resolver.is_instance``). Their help has no "{None}" and no "(default: None)", which do not say what is used instead.
"""

from typing import Annotated, Optional

import tyro

OptionalText = Annotated[Optional[str], tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]  # noqa: UP045
OptionalNumber = Annotated[Optional[int], tyro.conf.arg(metavar="INT", help_behavior_hint="")]  # noqa: UP045
OptionalFigure = Annotated[Optional[float], tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]  # noqa: UP045
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""False unless it is given; there is no opposite such as --no-json."""
