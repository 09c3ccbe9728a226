"""Starts an MPI world of the run's shape with `probe` in it, and judges what its ranks wrote."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_rollart.config.layout import blocks, world_size
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.doctor import probe
from hpc_rollart.doctor.results import Finding, from_line
from hpc_rollart.errors import LaunchError
from hpc_rollart.launch.attempt import Attempt, logs
from hpc_rollart.launch.rundir import RunDir
from hpc_rollart.launch.view import last_lines
from hpc_rollart.launch.world import Launcher, Outcome, World

_POLL_S = 0.25
# Another node's files may show here with a delay on a network file system.
_SEEN_WITHIN_S = 5.0
# Slower than a cluster's network should be. Of round trips the best one counts here: what busy cores do to
# the others is no fault of the network.
_SLOW_US, _SLOW_MB_S = 2000.0, 50.0
_SINGLETON = "has 1 rank,"


def try_world(
    config: RunConfig, run: RunDir, launcher: Launcher, *, deadline_s: float | None = None
) -> list[Finding]:
    """Start the world, wait for its end, and return what is to be said of it.

    Parameters
    ----------
    config
        Config whose ranks are started; all in place of their roles run `probe`.
    run
        A directory for this purpose alone.
    deadline_s
        Longest time it may take; `launch.start_deadline_s` if none is given.
    """
    limit = deadline_s or config.launch.start_deadline_s
    began = time.monotonic()
    try:
        with World(config, run, Attempt(0), launcher, probe.__name__) as world:
            while (outcome := world.poll()) is None:
                if time.monotonic() > began + limit and not world.stopping:
                    world.stop()  # its ranks are not at work as a run's are, so they are ended at once
                time.sleep(_POLL_S)
            overdue = world.stopping
    except LaunchError as error:
        return [from_line("MPI world", "all ranks", " ".join(str(error).split()))]
    took = time.monotonic() - began
    if overdue:
        return [_hung(config, run.path, limit)]
    found = _read(run.path) if outcome.state == "done" else probe.read_world(run.path)
    if found is None:
        return _broken(config, run.path, outcome)
    return judge(config, found, took)


def judge(config: RunConfig, found: dict[str, Any], took_s: float) -> list[Finding]:
    """Return what is to be said of a world that came to its end.

    Parameters
    ----------
    found
        Content of world.json.
    """
    text = f"{found['size']} ranks as expected, up and down in {took_s:.0f} s"
    cards = [probe.Card(**card) for card in found["cards"]]
    hosts = len({card.host for card in cards})
    out = [Finding("MPI world", f"{hosts} host{'s' if hosts > 1 else ''}", "ok", text)]
    for check in (_places, _threads, _gpus):
        out += check(config, cards)
    out += _versions(cards)
    out += _links(found["links"])
    out += _nccl(found["nccl"])
    return out


def _read(run_dir: Path) -> dict[str, Any] | None:
    until = time.monotonic() + _SEEN_WITHIN_S
    while (found := probe.read_world(run_dir)) is None and time.monotonic() < until:
        time.sleep(_POLL_S)
    return found


# --- a world that came to its end --------------------------------------------------------------------


def _places(config: RunConfig, cards: list[probe.Card]) -> Iterator[Finding]:
    for block in blocks(config):
        mine = [cards[rank] for rank in block.ranks]
        hosts = Counter(card.host for card in mine)
        where = ", ".join(f"{host} {count}" for host, count in list(hosts.items())[:4])
        more = f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
        wrong = [card for card in mine if card.claimed not in ("", block.component)]
        each = config.components[block.component].ranks_per_node
        uneven = [f"{host} has {count}" for host, count in hosts.items() if count != each]
        if wrong:
            text = f"rank {wrong[0].rank} was started as one of {wrong[0].claimed}"
            yield Finding("ranks", block.component, "fail", text, "report this: ranks and config disagree")
        elif uneven:
            text = f"{each} ranks a node wanted, {uneven[0]}"
            mend = "see that no other mpirun's host file or slots are set (PRTE_, OMPI_ variables)"
            yield Finding("ranks", block.component, "warn", text, mend)
        else:
            ranks = f"{block.first}" if block.count == 1 else f"{block.first}-{block.first + block.count - 1}"
            yield Finding("ranks", block.component, "ok", f"{ranks}; ranks by host: {where}{more}")


def _threads(config: RunConfig, cards: list[probe.Card]) -> Iterator[Finding]:
    wanted = {block.component: block.cpus_per_rank for block in blocks(config)}
    fine = True
    for card in cards:
        want, where = wanted[card.component], f"{card.component}-{card.rank}"
        if card.threads != want:
            fine = False
            text = f"OMP_NUM_THREADS is {card.threads or 'not set'}, cpus_per_rank {want}"
            mend = "remove OMP_NUM_THREADS from the profile's environment and setup"
            yield Finding("threads", where, "warn", text, mend)
        if card.cpus < want:
            fine = False
            text = f"may use {card.cpus} cores on {card.host}, cpus_per_rank is {want}"
            mend = "lower cpus_per_rank; on a cluster see that nothing binds ranks (SLURM_CPU_BIND)"
            yield Finding("threads", where, "warn", text, mend)
    if fine:
        yield Finding("threads", "all ranks", "ok", "as cpus_per_rank says")


def _gpus(config: RunConfig, cards: list[probe.Card]) -> Iterator[Finding]:
    given: dict[str, list[probe.Card]] = defaultdict(list)
    for card in cards:
        where = f"{card.component}-{card.rank} on {card.host}"
        if card.error:
            mend = "correct gpus_per_node or gres in the profile, or ask for fewer with gpus_per_rank"
            yield Finding("GPUs of ranks", where, "fail", card.error, mend)
        elif card.gpus is not None and len(card.gpus) != card.wanted_gpus:
            text = f"sees {', '.join(card.gpus) or 'none'}, wanted {card.wanted_gpus}"
            mend = "remove the variables that show GPUs from the profile's environment and setup"
            yield Finding("GPUs of ranks", where, "fail", text, mend)
        elif card.devices is not None and card.gpus is not None and card.devices != card.wanted_gpus:
            text = f"given {', '.join(card.gpus)}, but its GPU library sees {card.devices}"
            mend = "look at nvidia-smi on the node; the driver or the library does not fit it"
            yield Finding("GPUs of ranks", where, "fail", text, mend)
        elif card.wanted_gpus:
            given[card.component].append(card)
    for component, mine in given.items():
        first = mine[0]
        if first.gpus is None:
            text = "GPUs are given to ranks on a cluster only; here ranks compute on cores"
            yield Finding("GPUs of ranks", component, "skipped", text)
            continue
        shown = "; ".join(f"{card.component}-{card.rank}: {','.join(card.gpus or [])}" for card in mine[:4])
        seen = "no driver there: not checked further" if first.devices is None else "they work"
        yield Finding("GPUs of ranks", component, "ok", f"{shown}; {seen}")
    none = [card for card in cards if not card.wanted_gpus and card.gpus == []]
    if none:
        text = f"{len(none)} ranks that ask for none see none"
        yield Finding("GPUs of ranks", "other ranks", "ok", text)


def _versions(cards: list[probe.Card]) -> Iterator[Finding]:
    first = cards[0].versions
    for card in cards:
        odd = [f"{name} {card.versions.get(name) or 'missing'}, rank 0 has {version}"
               for name, version in first.items() if card.versions.get(name) != version]  # fmt: skip
        if odd:
            mend = "use one environment, or one image, for all nodes"
            where = f"{card.component}-{card.rank} on {card.host}"
            yield Finding("ranks' packages", where, "fail", "; ".join(odd), mend)


def _links(links: list[dict[str, Any]]) -> Iterator[Finding]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for link in links:
        groups[link["what"]].append(link)
    for what, group in groups.items():
        worst = max(group, key=lambda link: link["rtt_us"])
        slowest = min((link["mb_s"] for link in group if link["mb_s"]), default=None)
        text = f"round trip {worst['rtt_us']:,.0f} us"
        text += f", {slowest:,.0f} MB/s" if slowest else ""
        text += f" (worst of {len(group)} pairs)" if len(group) > 1 else ""
        where = f"ranks {worst['first']} and {worst['second']}"
        best = max(link["best_us"] for link in group)
        if best > _SLOW_US or (slowest or _SLOW_MB_S) < _SLOW_MB_S:
            mend = "set interface in the profile to the fast network; on one machine, free its cores"
            yield Finding(what, where, "warn", f"slow: {text}", mend)
        else:
            yield Finding(what, where, "ok", text)


def _nccl(nccl: dict[str, Any]) -> Iterator[Finding]:
    if not nccl:
        return
    where = f"{nccl['ranks']} GPU ranks"
    if "skipped" in nccl:
        yield Finding("NCCL", where, "skipped", f"{nccl['skipped']}: not checked")
    elif "error" in nccl:
        mend = "set interface in the profile; NCCL_DEBUG=INFO in its environment makes NCCL say more"
        yield Finding("NCCL", where, "warn", nccl["error"], mend)
    else:
        yield Finding("NCCL", where, "ok", f"broadcast of 16 MB at {nccl['mb_s']:,.0f} MB/s")


# --- a world that did not ----------------------------------------------------------------------------


def _broken(config: RunConfig, run_dir: Path, outcome: Outcome) -> list[Finding]:
    notes = probe.read_notes(run_dir)
    errors = [note for note in notes if note["error"]]
    alone = [note for note in errors if _SINGLETON in note["error"]]
    size = world_size(config)
    if alone and size > 1:
        hosts = ", ".join(sorted({note["host"] for note in alone})[:4])
        text = (
            f"singletons: {len(alone)} processes each started as a world of one (on {hosts}) instead of one "
            f"world of {size}: their MPI is not the one that started them"
        )
        mend = "use the mpirun beside python, and no mpi module; with launcher srun see srun --mpi=list"
        return [Finding("MPI world", "all ranks", "fail", text, mend)]
    if errors:
        return [_failure("MPI world", errors[0]["error"], errors[0]["host"])]
    return [_failure("MPI world", outcome.message or f"the world ended as {outcome.state}")]


def _hung(config: RunConfig, run_dir: Path, limit: float) -> Finding:
    """Say how far the ranks came."""
    notes = probe.read_notes(run_dir)
    size = world_size(config)
    at: dict[str, list[str]] = defaultdict(list)
    for note in notes:
        at[note["phase"]].append(f"{note['component'] or 'rank'}-{note['rank']} on {note['host']}")
    came = [f"{len(who)} at '{phase}' (such as {who[0]})" for phase, who in at.items()]
    missing = size - len(notes)
    came += [f"{missing} had not started"] if missing > 0 else []
    text = f"not done after {limit:.0f} s: {'; '.join(came)}"
    if said := last_lines(logs(run_dir, 0) / "mpirun.log", 3):
        text += f"; mpirun said: {' '.join(said)}"
    mend = "set interface in the profile to one that joins the nodes; look at firewalls between them"
    if missing > 0:
        mend = "look at the nodes where none started; raise launch.start_deadline_s if starting is slow"
    return Finding("MPI world", f"{size} ranks", "fail", text, mend)


def _failure(check: str, text: str, where: str = "all ranks") -> Finding:
    """Return a failure whose text is an error's own, which has its mend in it."""
    words = " ".join(text.split())
    return Finding(check, where, "fail", words[:600], "mend what it says; the log has the rest")
