"""The one description of what a run's YAML may say: every key, its type, its default and its meaning.

Models are frozen, reject unknown keys and do not coerce types. The docstring under each field is its
documentation everywhere: `hpc-rollart config schema`, docs/configuration.md and error messages.
Rules that span several keys are in `checks.py`; defaults that depend on another key are filled here,
so that a parsed `RunConfig` is complete.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Longer than anything runs, and within what Slurm and a timer can be told.
MAX_SECONDS = 3650 * 86400.0


def _seconds(value: Any) -> Any:
    """Turn "90s", "30m", "12h", "1h30m" or "2d" into seconds; leave anything else to the type check."""
    if isinstance(value, str):
        parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", value)
        if not parts or "".join(number + unit for number, unit in parts) != value:
            raise ValueError("expected a duration such as 90s, 30m, 12h or 1h30m")
        value = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    # Before the type check, to which a whole number beyond a float's range is no number at all.
    if isinstance(value, int | float) and value > MAX_SECONDS:
        raise ValueError("expected a duration of at most 10 years (3650d)")
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=MAX_SECONDS)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown key."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# --- run and model -----------------------------------------------------------------------------------


class Run(Section):
    """What the run is called, where it goes and when it ends."""

    name: Name
    """Name of the run; letters, digits, `-` and `_`."""
    dir: Annotated[str, Field(validate_default=True)] = "runs/{name}"
    """Run directory; `{name}` stands for the run's name. It must not hold another run."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything random: environments, sampling, initial weights."""
    steps: Count
    """Training steps; each consumes one batch and publishes one weight version."""
    time_budget: Seconds | None = None
    """Stop cleanly after this much time at work, over all attempts, such as `90s`, `12h`; null: no limit."""

    @field_validator("dir")
    @classmethod
    def _fill_name(cls, value: str, info: Any) -> str:
        return value.replace("{name}", info.data.get("name", "{name}"))


class WarmStart(Section):
    """Supervised start of a built-in tiny model, so that reinforcement learning has something to improve."""

    episodes: Count = 256
    """Demonstration episodes to train on, shared out among the tasks."""
    steps: Count = 200
    """Supervised optimiser steps."""
    batch: Count = 16
    """Episodes in one supervised step."""
    learning_rate: Positive = 1e-3
    """Peak learning rate of the supervised steps."""
    skill: dict[str, Fraction] = {}
    """Task name to the share of demonstrated actions that are expert ones, 0 (random) to 1 (expert)."""


class Model(Section):
    """The policy: a model of one's own or one of the built-in ones."""

    path: str | None = None
    """Directory of a model in Hugging Face format (safetensors, config, tokenizer). Or `builtin`."""
    builtin: Literal["tiny", "smollm2-135m-instruct"] | None = None
    """`tiny`: a small transformer made on the spot, for CPUs; `smollm2-135m-instruct`: a real small model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that are published and served; the trainer keeps its own in float32."""
    max_context: Annotated[int, Field(ge=16)] = 1024
    """Longest trajectory in tokens, prompt and all turns together."""
    warm_start: WarmStart | None = None
    """Supervised start before the first step; only with `builtin: tiny`."""


# --- algorithm and schedule --------------------------------------------------------------------------


class Clip(Section):
    """Bounds of the policy ratio: it is clipped to [1 - low, 1 + high]."""

    low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How far below 1 the ratio may fall."""
    high: Positive = 0.2
    """How far above 1 the ratio may rise."""


class TruncatedCorrection(Section):
    """Truncated importance sampling per token, for tokens that an older version sampled."""

    type: Literal["truncated"] = "truncated"
    """Kind of correction."""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest importance weight."""


class Grpo(Section):
    """Group relative policy optimisation: a trajectory's advantage is its reward less its group's mean."""

    type: Literal["grpo"]
    """Kind of algorithm."""
    group_size: Count = 8
    """Trajectories of one group: the same task and environment seed, sampled independently."""
    groups_per_batch: Count = 8
    """Complete groups in one training batch."""
    learning_rate: Positive = 1e-5
    """Peak learning rate of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    """AdamW's two decay rates."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0."""
    minibatches: Count = 1
    """Optimiser updates per batch; each takes a share of the batch's groups."""
    clip: Clip = Clip()
    """Bounds of the policy ratio."""
    correction: TruncatedCorrection = TruncatedCorrection()
    """How tokens sampled by an older version are weighted."""
    micro_batch_tokens: Count = 4096
    """Tokens in one forward and backward pass; bounds the trainer's memory."""
    normalise_std: bool = True
    """Divide advantages by their group's standard deviation."""


class Redundancy(Section):
    """Work started beyond what a batch needs; the first to finish is kept, the rest cancelled."""

    groups: Annotated[int, Field(ge=0)] = 0
    """Extra groups in flight beside `algorithm.groups_per_batch`."""
    members: Annotated[int, Field(ge=0)] = 0
    """Extra trajectories in each group beside `algorithm.group_size`."""


class Retry(Section):
    """What happens when an environment fails."""

    attempts: Count = 3
    """Tries of one member of a group, the first included, before the group is given up."""
    backoff_s: Positive = 1.0
    """Wait before the second try, in seconds; it doubles with each further one."""
    backoff_max_s: Positive = 60.0
    """Longest wait between two tries, in seconds."""


_ALPHA_OF_MODE = {"async": 1, "one_off": 1, "sync": 0}


class Schedule(Section):
    """How rollout and training overlap."""

    mode: Literal["async", "one_off", "sync"] = "async"
    """`async`: both run all the time; `one_off`: rollout works one batch ahead; `sync`: they alternate."""
    alpha: Annotated[int, Field(ge=0)] = 1
    """Weight versions a trajectory may lag behind when trained on; default 1, in `sync` mode 0."""
    share_patience: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """How long a batch that others could fill waits for a slow task's share, as a multiple of the time since
    the batch before: 1.0 at most doubles it, 0 takes whatever is complete. Never longer than a quarter of
    `launch.stall_deadline_s`."""
    redundancy: Redundancy = Redundancy()
    """Work started beyond what a batch needs."""
    retry: Retry = Retry()
    """What happens when an environment fails."""

    @model_validator(mode="before")
    @classmethod
    def _alpha_of_mode(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("alpha") is None:
            return {**data, "alpha": _ALPHA_OF_MODE.get(str(data.get("mode", "async")), 1)}
        return data


# --- tasks -------------------------------------------------------------------------------------------


class Timeouts(Section):
    """Deadlines of one environment's calls; an environment that misses one has failed."""

    reset_s: Seconds = 30.0
    """Longest `reset`, in seconds."""
    step_s: Seconds = 30.0
    """Longest `step`, in seconds."""


class SamplingConfig(Section):
    """How tokens are drawn from the policy."""

    temperature: Positive = 1.0
    """Divides the logits; above 0, as a policy gradient needs a distribution."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus truncation; 1.0 leaves the distribution whole."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k most likely tokens; 0 leaves the distribution whole."""
    max_tokens: Count = 64
    """Most tokens sampled in one turn."""


class Task(Section):
    """One environment that the policy is trained on."""

    name: Name
    """Name of the task; appears in metrics, reports and shards."""
    env: str
    """Environment: a name from docs/environments.md."""
    args: dict[str, Any] = {}
    """Arguments of the environment."""
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Share of every batch that is of this task, relative to the other tasks' weights."""
    affinity: Name | None = None
    """Pool of generators that serves this task; null: any pool."""
    max_turns: Count = 16
    """Turns after which an episode ends."""
    timeouts: Timeouts = Timeouts()
    """Deadlines of the environment's calls."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn from the policy."""


# --- engine and components ---------------------------------------------------------------------------


class TransformersEngine(Section):
    """The built-in engine: continuous batching over a `transformers` model."""

    type: Literal["transformers"] = "transformers"
    """Kind of engine."""
    deterministic: bool = False
    """Make a request's samples independent of what it was batched with (slower)."""
    max_requests: Count = 64
    """Requests decoded together on one generator rank."""
    prefill_tokens: Count = 2048
    """Most prompt tokens taken in between two decoding steps."""


class Component(Section):
    """A block of equal ranks; blocks are numbered in the order of the file."""

    role: str
    """What the ranks do: trainer, generator or env."""
    nodes: Count = 1
    """Nodes of this component."""
    ranks_per_node: Count = 1
    """Ranks on each node."""
    cpus_per_rank: Count = 1
    """CPU cores, and computing threads, of each rank."""
    partition: Name | None = None
    """Entry of the cluster profile's `partitions` to run in; null: the one for `gpu`, else for the role."""

    @property
    def ranks(self) -> int:
        """Number of ranks, `nodes` times `ranks_per_node`."""
        return self.nodes * self.ranks_per_node


class GpuComponent(Component):
    """A component whose ranks may have GPUs."""

    gpu: Name | None = None
    """Type of GPU, as the cluster profile names it; null: that of the partition."""
    gpus_per_rank: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each rank on a cluster; 0: the rank computes on its CPU cores and sees no GPU."""


class TrainerComponent(GpuComponent):
    """The rank that trains the policy and publishes its weights."""

    role: Literal["trainer"]
    """What the ranks do: trainer, generator or env."""


class GeneratorComponent(GpuComponent):
    """Ranks that sample tokens, one replica of the policy each."""

    role: Literal["generator"]
    """What the ranks do: trainer, generator or env."""
    pool: Name = "default"
    """Pool these replicas belong to; a task's `affinity` names one."""
    engine: TransformersEngine = TransformersEngine()
    """Engine of these ranks; keys left out are those of the top-level `engine`."""


class EnvComponent(Component):
    """Ranks that run episodes; the first rank of the first such component coordinates the run instead."""

    role: Literal["env"]
    """What the ranks do: trainer, generator or env."""
    slots: Annotated[int, Field(ge=1, le=1024)] = 16
    """Episodes that one rank runs at a time."""


AnyComponent = Annotated[TrainerComponent | GeneratorComponent | EnvComponent, Field(discriminator="role")]


# --- weights, store, checkpoint, launch --------------------------------------------------------------


class Weights(Section):
    """How new weights reach the generators."""

    transport: Literal["mpi"] = "mpi"
    """`mpi`: broadcast from host memory."""
    bucket_mb: Count = 64
    """Size of one transfer unit, in MiB."""
    kv_after_update: Literal["recompute", "keep"] = "recompute"
    """KV caches of unfinished requests after an update: recomputed under the new weights, or kept."""
    deadline_s: Seconds = 60.0
    """Longest transfer of one version, in seconds."""


class Store(Section):
    """How trajectories are written."""

    filter: Literal["bitshuffle-lz4", "gzip", "none"] = "bitshuffle-lz4"
    """HDF5 compression filter."""
    rotate_mb: Count = 1024
    """Size at which a writer begins a new shard, in MiB."""
    flush_every_s: Seconds = 5.0
    """Longest time a finished trajectory stays unwritten, in seconds."""


class Checkpoint(Section):
    """When the trainer's state is saved; a final checkpoint is always written."""

    every_steps: Count | None = 20
    """Steps between two checkpoints: the most that a lost node or job costs. Null: only the final one."""
    keep: Count = 2
    """Newest checkpoints that are kept; older ones are removed when a new one is whole."""
    resume: str = "auto"
    """Where a run's first attempt begins: `auto` at the newest checkpoint in its own directory, if there is
    one, else with the model; `never` with the model, whatever is there; or the directory of a checkpoint of
    another run, which is then this run's step 0. Later attempts go on from the run's own checkpoints."""


class Restart(Section):
    """What happens when an attempt of the run fails: a rank died, a node was lost, nothing progressed."""

    attempts: Annotated[int, Field(ge=0)] = 3
    """Failed attempts in a row, none of which got a checkpoint further, after which the run fails."""
    backoff_s: Seconds = 5.0
    """Wait before the next attempt, in seconds; it doubles with each further one, up to a minute."""


class Launch(Section):
    """How the ranks are started."""

    launcher: Literal["mpirun", "srun"] = "mpirun"
    """`mpirun`: Open MPI, on this machine or through daemons that srun starts on the nodes of a job; `srun`:
    Slurm starts the ranks itself, `srun --mpi=pmix`, where the site's MPI must be used."""
    restart: Restart = Restart()
    """What happens when an attempt fails inside a Slurm job; `hpc-rollart run` makes one attempt."""
    max_requeues: Annotated[int, Field(ge=0)] = 100
    """How often a run goes back into the queue: its job at the time limit or when it is preempted, or a new
    job in place of one with a lost node."""
    stop_lead_s: Seconds = 180.0
    """How long before the job's end the ranks stop: time for the last step and a checkpoint, in seconds."""
    heartbeat_s: Seconds = 60.0
    """A rank that says nothing for this long while a run goes on is taken for lost, in seconds; of the
    coordinator half a minute more is awaited."""
    max_ranks: Count | None = None
    """Refuse to start more ranks than this; null: twice the machine's cores, and at least 16."""
    start_deadline_s: Seconds = 120.0
    """Longest start, from launching the ranks to all of them at work, in seconds."""
    stall_deadline_s: Seconds = 600.0
    """Longest time without any progress before the run fails, in seconds."""


class RunConfig(Section):
    """A whole run."""

    run: Run
    """What the run is called, where it goes and when it ends."""
    model: Model
    """The policy."""
    algorithm: Grpo
    """How the policy is trained."""
    schedule: Annotated[Schedule, Field(validate_default=True)] = Schedule()
    """How rollout and training overlap."""
    tasks: Annotated[list[Task], Field(min_length=1, max_length=256)]
    """Environments that the policy is trained on."""
    engine: TransformersEngine = TransformersEngine()
    """Engine of every generator component that does not say otherwise."""
    components: Annotated[dict[Name, AnyComponent], Field(min_length=1)]
    """Name to component: the blocks of ranks, in rank order."""
    weights: Weights = Weights()
    """How new weights reach the generators."""
    store: Store = Store()
    """How trajectories are written."""
    checkpoint: Checkpoint = Checkpoint()
    """When the trainer's state is saved."""
    launch: Launch = Launch()
    """How the ranks are started."""
    cluster: str | None = None
    """Name or file of the cluster profile that `hpc-rollart submit` uses when no `--cluster` is given."""

    @model_validator(mode="before")
    @classmethod
    def _engine_of_generators(cls, data: Any) -> Any:
        """Complete each generator's `engine` from the top-level one."""
        if not isinstance(data, dict):
            return data
        common, components = data.get("engine") or {}, data.get("components")
        if not isinstance(common, dict) or not isinstance(components, dict):
            return data
        filled = {
            name: {**part, "engine": {**common, **(part.get("engine") or {})}}
            if isinstance(part, dict)
            and part.get("role") == "generator"
            and isinstance(part.get("engine") or {}, dict)
            else part
            for name, part in components.items()
        }
        return {**data, "components": filled}

    @property
    def stop_deadline_s(self) -> float:
        """Seconds that the ranks have to end a step and a broadcast, and to flush, once told to stop."""
        return 60.0 + self.weights.deadline_s

    def resolved(self) -> dict[str, Any]:
        """Return the whole config, defaults included, as plain data ready for YAML or JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Self:
        """Validate plain data; raises `pydantic.ValidationError`. `load` gives readable errors."""
        return cls.model_validate(data)
