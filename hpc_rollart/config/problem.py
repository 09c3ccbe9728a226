"""What is wrong with a config: one problem, and the error that carries them all to the user."""

from dataclasses import dataclass

from hpc_rollart.errors import UserError

Path = tuple[str | int, ...]


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
