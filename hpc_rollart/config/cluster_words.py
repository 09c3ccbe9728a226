"""What may stand in a cluster profile: words of sbatch options, and names that are somebody else's to set."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from hpc_rollart.config.problem import Problem, short

# Text that becomes the value of an option is one word, so that it cannot become anything else.

_SHOWN = 8
_SHELL = "'\"\\`$;&|<>(){}*?!#"


def _refuse(value: str, characters: str) -> None:
    wrong = dict.fromkeys(c for c in value if c in characters or c.isspace() or not c.isprintable())
    bad = list(wrong)[:_SHOWN]
    if bad or not value:
        shown = f": leave out {' '.join('blanks' if c.isspace() else short(c) for c in bad)}" if bad else ""
        raise ValueError(f"expected one word without blanks, quotes and what a shell would read{shown}")


def _word(value: str) -> str:
    _refuse(value, _SHELL)
    return value


def _constraint(value: str) -> str:
    _refuse(value, "".join(set(_SHELL) - set("&|()*!")))
    return value


def _account(value: str) -> str:
    _refuse(value.replace("{account}", "x"), _SHELL)
    return value


def _gres(value: str) -> str:
    if "{count}" not in value:
        raise ValueError("expected {count} where the number of GPUs goes, such as gpu:{count}")
    _refuse(value.replace("{count}", "1"), _SHELL)
    return value


def _option(value: Any) -> Any:
    if not isinstance(value, str | bool | int):
        raise ValueError("expected one word, a whole number, true or false")
    return _word(value) if isinstance(value, str) else value


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("expected a variable's name of letters, digits and _, no digit first")
    return value


def _scratch(value: str) -> str:
    if not re.fullmatch(r"(\$[A-Za-z_][A-Za-z0-9_]*)?(/[^\x00-\x1f]*)?", value) or not value:
        raise ValueError("expected an absolute path such as /tmp, or a variable without braces: $TMPDIR/x")
    return value


Word = Annotated[str, Field(max_length=200), AfterValidator(_word)]
Constraint = Annotated[str, Field(max_length=200), AfterValidator(_constraint)]
Account = Annotated[str, Field(max_length=200), AfterValidator(_account)]
Gres = Annotated[str, Field(max_length=200), AfterValidator(_gres)]
Option = Annotated[str | bool | int, BeforeValidator(_option)]
Scratch = Annotated[str, AfterValidator(_scratch)]
VariableName = Annotated[str, AfterValidator(_variable)]

# Options that other keys, the run or this program decide, and those with which a submission or a job would be
# no run; each with the mend.
_KEY, _GPUS = "use the key {}", "use the keys gpu and gres, and gpus_per_rank of the run's components"
_FOLLOWS = "it follows from the run's components and name; remove it"
_SAYS = "it changes what sbatch says, which this program reads; remove it"
_PASSED_ON = "the job has the shell's environment; use the keys environment and setup"
_DECIDED = {
    "account": _KEY.format("account"),
    "constraint": _KEY.format("constraint"),
    "container": _KEY.format("container"),
    "container-id": _KEY.format("container"),
    "gres": _KEY.format("gres"),
    "mem": _KEY.format("memory"),
    "mem-per-cpu": _KEY.format("memory"),
    "mem-per-gpu": _KEY.format("memory"),
    "no-requeue": _KEY.format("requeue"),
    "partition": _KEY.format("partition"),
    "qos": _KEY.format("qos"),
    "requeue": _KEY.format("requeue"),
    "reservation": _KEY.format("reservation"),
    "signal": _KEY.format("signal"),
    "time": _KEY.format("time"),
    "cpus-per-gpu": "use cpus_per_rank of the run's components",
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "gpus-per-socket": _GPUS,
    "gpus-per-task": _GPUS,
    "ntasks-per-gpu": _GPUS,
    "tres-per-task": _GPUS,
    "array": _FOLLOWS,
    "cpus-per-task": _FOLLOWS,
    "error": _FOLLOWS,
    "het-group": _FOLLOWS,
    "hetjob": _FOLLOWS,
    "job-name": _FOLLOWS,
    "nodes": _FOLLOWS,
    "ntasks": _FOLLOWS,
    "ntasks-per-node": _FOLLOWS,
    "output": _FOLLOWS,
    "packjob": _FOLLOWS,
    "tasks-per-node": _FOLLOWS,
    "chdir": "a job starts where it was submitted; use cd there, or absolute paths",
    "clusters": "Slurm's other commands must find the job too; set SLURM_CLUSTERS in your shell",
    "export": _PASSED_ON,
    "export-file": _PASSED_ON,
    "get-user-env": _PASSED_ON,
    "help": _SAYS,
    "input": "a job reads nothing; remove it",
    "no-kill": "it is always asked for: a lost node ends an attempt, not the job; remove it",
    "open-mode": "a job that comes back goes on with its log; remove it",
    "parsable": _SAYS,
    "quiet": _SAYS,
    "test-only": "nothing would be submitted; use hpc-rollart submit --dry-run",
    "usage": _SAYS,
    "verbose": _SAYS,
    "version": _SAYS,
    "wait": "sbatch would not come back before the run's end; use hpc-rollart status --watch",
    "wrap": "this program writes the script; use the key setup for lines of shell",
}

# Variables that this program, Slurm or MPI set for a run, and those with which nothing would start. The first
# that fits is taken.
_NOT_SET_HERE = (
    # MPI's own switches, but for the directories and the way of starting that belong to one attempt.
    (
        r"OMPI_MCA_btl_sm_backing_directory|PRTE_MCA_(plm|ras|prte_tmpdir).*",
        "it is set for each attempt; remove it",
    ),
    (r"(OMPI|PRTE|PMIX)_MCA_.*|ROLLART_CACHE", ""),
    (r"ROLLART_.*", "this program sets it itself; remove it"),
    (
        r"(SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SACCT|SCANCEL|SUBMITIT)_.*",
        "Slurm sets it, or its commands obey it; use options, or remove it",
    ),
    (
        r"(PMIX|PMI|PRTE|OMPI)_.*",
        "MPI sets it for each rank; only its OMPI_MCA_, PRTE_MCA_ and PMIX_MCA_ may be tuned",
    ),
    (
        r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK",
        "it follows from gpus_per_rank of the run's components; remove it",
    ),
    (
        r"(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS",
        "it follows from cpus_per_rank of the run's components; remove it",
    ),
    (
        r"TMPDIR|(TRITON|TORCHINDUCTOR)_CACHE_DIR|VLLM_CACHE_ROOT|CUDA_CACHE_PATH|HF_MODULES_CACHE",
        "it lies in the run's own scratch; use the key scratch",
    ),
    (
        r"PATH|LD_PRELOAD|LD_AUDIT",
        "Slurm's commands would have it too, in place of the node's; use modules, or an export in setup",
    ),
    (r"PYTHONHOME", "Python would not start; use the key python"),
)


def decided(where: str, options: dict[str, str | bool | int]) -> list[Problem]:
    """Return the sbatch options at `where` that are not a profile's to give."""
    problems = []
    for name in options:
        # sbatch takes the beginning of a long name for the whole.
        full = name if name in _DECIDED else next((n for n in _DECIDED if n.startswith(name)), "")
        if len(name) == 1:
            text = f"-{name} is one letter: give the long name that sbatch --help shows beside it"
        elif full:
            text = f"--{full} is not set here: {_DECIDED[full]}"
        else:
            continue
        problems.append(Problem((*where.split("."), name), text))
    return problems


def variables(environment: dict[str, str]) -> list[Problem]:
    """Return the variables that are not a profile's to set."""
    problems = []
    for name in environment:
        mend = next((mend for pattern, mend in _NOT_SET_HERE if re.fullmatch(pattern, name)), "")
        if mend:
            problems.append(Problem(("environment", name), f"{name} is not set here: {mend}"))
    return problems
