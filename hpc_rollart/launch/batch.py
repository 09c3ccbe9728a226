"""The text of a batch script for one heterogeneous job, made to be read by the person whose job it is."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Option = str | int | bool
Options = Mapping[str, Option]

# sbatch takes these for something else in a path, and cannot be told not to in all versions; the last are
# bytes of a path that are no UTF-8, as the script is.
ODD = re.compile(r"[%'\"\\\x00-\x1f\ud800-\udfff]")

# What a shell that submits may have left in the job's environment. Slurm's own variables of this job stay.
_CLEARED = ("SBATCH_", "SRUN_", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "PMIX_", "PMI_", "PRTE_", "OMPI_")

# A batch shell is no login shell, so a site's module command may not be there yet.
_FIND_MODULE = """\
if ! command -v module >/dev/null; then
  for file in "${LMOD_PKG:-}/init/bash" "${MODULESHOME:-}/init/bash" /etc/profile.d/{lmod,modules}.sh; do
    if [ -r "$file" ]; then . "$file"; break; fi
  done
fi"""


@dataclass(frozen=True)
class HetComponent:
    """One component of the job.

    Attributes
    ----------
    title
        What it is, for the comment above its options.
    options
        Long name of each sbatch option to its value; True for one without a value.
    """

    title: str
    options: Options


@dataclass(frozen=True)
class Batch:
    """All that a batch script says, but for its command.

    Attributes
    ----------
    title
        Comment lines at the top.
    options
        sbatch options of the whole job.
    components
        Components in the order of the run's config, which is the order of its ranks.
    modules
        Modules to load.
    setup
        Shell lines, as they are.
    environment
        Variables to export; values are taken literally.
    """

    title: Sequence[str]
    options: Options
    components: Sequence[HetComponent]
    modules: Sequence[str] = ()
    setup: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def text(self, command: str) -> str:
        """Return the script that ends in `command`, a line of shell."""
        blocks = [["#!/bin/bash", *(f"# {line}".rstrip() for line in self.title)], *self._options()]
        blocks += [["# What the shell that submitted had inherited does not concern this job.", _clear()]]
        blocks += self._modules()
        if self.setup:
            blocks.append(["# The profile's setup, word for word.", *self.setup])
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        blocks.append(["# Environment.", *exports, "export SUBMITIT_EXECUTOR=slurm"])
        blocks.append(
            [
                "# The supervisor, which starts the ranks on the nodes itself. With exec and not under srun:",
                "# so it is the batch step's own process, which Slurm warns before the job's end.",
                f"exec {command}",
            ]
        )
        return "\n\n".join("\n".join(block) for block in blocks) + "\n"

    def _options(self) -> Iterator[list[str]]:
        yield ["# The whole job.", *_lines(self.options)]
        for number, part in enumerate(self.components):
            separator = ["#SBATCH hetjob"] if number else []
            yield [*separator, f"# Component {number}: {part.title}", *_lines(part.options)]

    def _modules(self) -> Iterator[list[str]]:
        if not self.modules:
            return
        load = " ".join(map(shlex.quote, self.modules))
        missing = f"warning: there is no module command here; not loaded: {' '.join(self.modules)}"
        yield [
            "# Modules.",
            _FIND_MODULE,
            "if command -v module >/dev/null; then",
            "  module purge || true # modules that a site holds on to are no error",
            f"  module load {load} || exit 1",
            "else",
            f"  echo {shlex.quote(missing)} >&2",
            "fi",
        ]


def _lines(options: Options) -> list[str]:
    """Return one line an option; an option that is False is not set."""
    return [
        f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for name, value in options.items()
        if value is not False
    ]


def _clear() -> str:
    patterns = " ".join(f"${{!{prefix}@}}" for prefix in _CLEARED)
    return f"unset {patterns}"
