"""Rules that span several keys, and what only this machine can tell; each says the key and the mend."""

import os
from collections.abc import Iterator
from pathlib import Path

from hpc_rollart.config.layout import pools, world_size
from hpc_rollart.config.problem import PATH, Problem, short
from hpc_rollart.config.schema import RunConfig


def across_keys(config: RunConfig) -> list[Problem]:
    """Return what is wrong between keys that are each valid on their own."""
    return [*_model(config), *_algorithm(config), *_schedule(config), *_tasks(config), *_components(config)]


def on_this_machine(config: RunConfig) -> list[Problem]:
    """Return what keeps the run from starting here: missing files, unknown environments, too many ranks."""
    return [*_files(config), *_envs(config), *_ranks(config), *_launcher(config)]


def on_a_cluster(config: RunConfig) -> list[Problem]:
    """Return what keeps the run from starting anywhere; nodes and ranks are the cluster's business."""
    return [*_files(config), *_envs(config)]


def default_max_ranks() -> int:
    """Return the value that `launch.max_ranks: null` stands for."""
    return max(16, 2 * (os.cpu_count() or 1))


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if (model.path is None) == (model.builtin is None):
        given = "neither is" if model.path is None else "both are"
        yield Problem(("model",), f"give exactly one of path and builtin; {given} given")
    if model.warm_start is None:
        return
    if model.builtin != "tiny":
        yield Problem(
            ("model", "warm_start"),
            "only the built-in tiny model has a warm start; remove it or use model.builtin: tiny",
        )
    names = [task.name for task in config.tasks]
    for name in model.warm_start.skill:
        if name not in names:
            yield Problem(
                ("model", "warm_start", "skill", name),
                f"no task is named {name!r}; tasks: {', '.join(names)}",
            )


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.group_size < 2:
        yield Problem(
            ("algorithm", "group_size"),
            "with 1 every advantage is zero, as a group's mean is its only "
            "reward, and nothing is learnt; use 2 or more",
        )
    if algorithm.minibatches > algorithm.groups_per_batch:
        yield Problem(
            ("algorithm", "minibatches"),
            f"{algorithm.minibatches} minibatches cannot share {algorithm.groups_per_batch} "
            f"groups; use at most algorithm.groups_per_batch",
        )
    if algorithm.warmup_steps >= config.run.steps and algorithm.warmup_steps > 0:
        yield Problem(
            ("algorithm", "warmup_steps"),
            f"the learning rate would still rise when the run ends after {config.run.steps} steps; "
            f"use fewer than run.steps",
        )


def _schedule(config: RunConfig) -> Iterator[Problem]:
    schedule = config.schedule
    if schedule.mode == "sync" and schedule.alpha != 0:
        yield Problem(
            ("schedule", "alpha"),
            f"mode sync trains on fresh trajectories only: alpha is 0, not "
            f"{schedule.alpha}; set schedule.alpha to 0, or use mode: async",
        )
    if schedule.mode == "one_off" and schedule.alpha != 1:
        yield Problem(
            ("schedule", "alpha"),
            f"mode one_off works exactly one batch ahead: alpha is 1, not "
            f"{schedule.alpha}; set schedule.alpha to 1, or use mode: async",
        )
    if schedule.retry.backoff_max_s < schedule.retry.backoff_s:
        yield Problem(
            ("schedule", "retry", "backoff_max_s"),
            f"{schedule.retry.backoff_max_s:g} is less than backoff_s ({schedule.retry.backoff_s:g})",
        )


def _tasks(config: RunConfig) -> Iterator[Problem]:
    known, seen = pools(config), set()
    for index, task in enumerate(config.tasks):
        if task.name in seen:
            yield Problem(("tasks", index, "name"), f"another task is named {task.name!r} too; rename one")
        seen.add(task.name)
        if task.affinity is not None and known and task.affinity not in known:
            yield Problem(
                ("tasks", index, "affinity"),
                f"no component has pool {task.affinity!r}; pools: {', '.join(known)}",
            )
        if task.sampling.max_tokens >= config.model.max_context:
            yield Problem(
                ("tasks", index, "sampling", "max_tokens"),
                f"{task.sampling.max_tokens} leaves no room for a prompt; use less than "
                f"model.max_context, {config.model.max_context}",
            )


def _components(config: RunConfig) -> Iterator[Problem]:
    parts = config.components
    trainers = [name for name, part in parts.items() if part.role == "trainer"]
    ranks = sum(parts[name].ranks for name in trainers)
    if not trainers:
        yield Problem(("components",), "no component has role trainer; add one with one rank")
    elif ranks != 1:
        yield Problem(
            ("components", trainers[-1]),
            f"{ranks} trainer ranks; this version trains on exactly one: use one component of role "
            f"trainer with nodes: 1 and ranks_per_node: 1",
        )
    if not pools(config):
        yield Problem(("components",), "no component has role generator; add one")
    envs = [name for name, part in parts.items() if part.role == "env"]
    if not envs:
        yield Problem(("components",), "no component has role env; add one with ranks_per_node: 2 or more")
    elif parts[envs[0]].ranks < 2:
        yield Problem(
            ("components", envs[0], "ranks_per_node"),
            "its first rank coordinates the run and runs no episodes; use 2 or more",
        )
    limit = config.launch.max_ranks
    if limit is not None and world_size(config) > limit:
        yield _too_many(config, limit)


def _too_many(config: RunConfig, limit: int) -> Problem:
    parts = ", ".join(f"{name} {part.ranks}" for name, part in config.components.items())
    return Problem(
        ("launch", "max_ranks"),
        f"the run has {world_size(config)} ranks ({parts}) and only {limit} may start here; "
        f"use fewer ranks or raise launch.max_ranks",
    )


def _ranks(config: RunConfig) -> Iterator[Problem]:
    for name, part in config.components.items():
        if part.nodes > 1:
            yield Problem(
                ("components", name, "nodes"),
                f"{part.nodes} nodes, but this is one machine; use nodes: 1 and ranks_per_node",
            )
    if config.launch.max_ranks is None and world_size(config) > default_max_ranks():
        yield _too_many(config, default_max_ranks())


def _launcher(config: RunConfig) -> Iterator[Problem]:
    if config.launch.launcher == "srun":
        yield Problem(
            ("launch", "launcher"),
            "srun starts ranks inside a Slurm job only; use mpirun here, or hpc-rollart submit",
        )


def _files(config: RunConfig) -> Iterator[Problem]:
    if config.model.path is None:
        return
    # os.path takes a path that is too long, or of a user that there is not, for one that is not there.
    path = Path(os.path.expanduser(config.model.path))
    if not os.path.isdir(path):
        yield Problem(("model", "path"), f"there is no directory {short(str(path), PATH)}")
    elif not (path / "config.json").is_file():
        yield Problem(("model", "path"), f"{path} holds no config.json, so it is no model directory")


def _envs(config: RunConfig) -> Iterator[Problem]:
    # Imported here: an environment may bring packages that reading a finished run does not need.
    from envs_cpu.registry import check_env

    for index, task in enumerate(config.tasks):
        try:
            check_env(task.env, task.args)
        except ValueError as error:
            yield Problem(("tasks", index), str(error).replace(task.env, short(task.env)))
