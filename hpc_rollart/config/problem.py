"""What is wrong with a config: one problem, and the error that carries them all to the user."""

from dataclasses import dataclass

from hpc_rollart.errors import UserError

Path = tuple[str | int, ...]

# So much of a value is quoted in a message: what is wrong with a longer one shows in its beginning.
_QUOTED = 80
PATH = 300
"""The same of a path, which may be copied from there."""


def short(text: str, limit: int = _QUOTED) -> str:
    """Return `text` as a message quotes it: printable, on one line, and cut where it is very long."""
    seen = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return seen if len(text) <= limit else f"{seen[: limit - 20]}... ({len(text):,} characters)"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes
    ----------
    path
        Where: keys and list indices from the top of the config.
    text
        What, and the mend, in one line without the path.
    """

    path: Path
    text: str


class ConfigError(UserError):
    """The config cannot be used; `lines` has one line per problem: file, key path, what and the mend."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
