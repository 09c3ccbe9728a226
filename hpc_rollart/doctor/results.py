"""What the doctor found: one line of its table each, for people and for programs."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_rollart.launch.rundir import write_json

Level = Literal["ok", "warn", "fail", "skipped"]
# Words, not signs: they can be searched for in a log and read on any terminal.
_WORDS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "bold red"),
    "skipped": ("--", "dim"),
}
KEPT = "kept"
"""Check of the finding that names the folder which stays."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    check
        What was looked at, in a word or two.
    where
        Node, rank, path or key that it is about.
    level
        `fail`: a run would not start, or not work. `warn`: it would, but look at it. `skipped`: not checked.
    text
        What was found.
    mend
        What to do about it; empty if nothing is to be done.
    """

    check: str
    where: str
    level: Level
    text: str
    mend: str = ""


def from_line(check: str, where: str, line: str) -> Finding:
    """Return the failure that an error's line tells, which has its mend behind the last semicolon."""
    for separator in ("; ", "\n", ", use ", ": use ", ": install "):
        text, found, mend = line.rpartition(separator)
        if found:
            verb = separator.strip(":,; \n")
            return Finding(check, where, "fail", text, f"{verb} {mend}".strip())
    return Finding(check, where, "fail", line)


def from_lines(check: str, where: str, lines: Iterable[str]) -> list[Finding]:
    """Return a failure for each line of an error."""
    return [from_line(check, where, line) for line in lines]


def verdict(findings: Sequence[Finding]) -> Level:
    """Return the worst level among the findings; what was skipped is no fault."""
    levels = {finding.level for finding in findings}
    return next((level for level in ("fail", "warn") if level in levels), "ok")


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 2 when something would fail, else 0."""
    return 2 if verdict(findings) == "fail" else 0


def show(findings: Sequence[Finding], where: str, console: Console, took_s: float) -> None:
    """Print the table and the verdict; readable in 80 columns.

    Parameters
    ----------
    where
        Where the run would start, such as ``this machine``.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("check")
    table.add_column("where", overflow="fold", max_width=22)
    table.add_column("result", overflow="fold")
    for finding in findings:
        if finding.check == KEPT:
            continue
        word, style = _WORDS[finding.level]
        result = Text(finding.text)
        if finding.mend:
            result.append(f"\n-> {finding.mend}", style="bold" if finding.level == "fail" else "")
        table.add_row(Text(word, style=style), finding.check, Text(finding.where), result)
    console.print(table)
    for finding in findings:
        if finding.check == KEPT:  # a path, to be copied: never broken into lines
            console.print(f"{finding.text} in {finding.where}", highlight=False, soft_wrap=True)
    console.print(summary(findings, where, took_s), style=_WORDS[verdict(findings)][1], highlight=False)


def summary(findings: Sequence[Finding], where: str, took_s: float) -> str:
    """Return the verdict in a line."""
    count = Counter(finding.level for finding in findings if finding.check != KEPT)
    what = {
        "ok": f"The run will start on {where}",
        "warn": f"The run will start on {where}, but see what is marked warn",
        "fail": f"The run would fail on {where}: mend what is marked FAIL",
    }[verdict(findings)]
    parts = [(count["ok"], "fine"), (count["warn"], "warned of"), (count["fail"], "failed")]
    parts.append((count["skipped"], "not checked"))
    return f"{what}. " + ", ".join(f"{n} {word}" for n, word in parts if n) + f"; {took_s:.0f} s."


def as_json(findings: Sequence[Finding], where: str, took_s: float) -> str:
    """Return everything for programs."""
    found = {"verdict": verdict(findings), "where": where, "took_s": round(took_s, 1)}
    return json.dumps(found | {"findings": [asdict(finding) for finding in findings]}, indent=2)


def write(path: Path, findings: Sequence[Finding]) -> None:
    """Keep the findings in a file, whole or not at all."""
    write_json(path, [asdict(finding) for finding in findings])


def read(path: Path) -> list[Finding]:
    """Read what `write` wrote."""
    return [Finding(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
