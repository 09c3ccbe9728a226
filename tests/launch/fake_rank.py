"""A rank that opens a real MPI world and then plays a scene named in RUN/scene, instead of training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def write_status(run: Path, **fields: object) -> None:
    """Replace status.json as the coordinator does."""
    base = {
        "state": "running", "step": 0, "steps": 3, "t": time.time(), "t_start": time.time(), "eta_s": None,
        "version": 0, "tasks": {"count": {"reward": None, "trajectories": 0, "failed": 0}},
        "tokens_per_s": 0.0, "staleness": {}, "in_flight": 0, "groups": {"open": 0, "complete": 0},
        "waits": {}, "message": "",
    }  # fmt: skip
    aside = run / ".status"
    aside.write_text(json.dumps(base | fields))
    os.replace(aside, run / "status.json")


def train(run: Path, steps: int) -> None:
    """Write the lines of a few quick steps."""
    for step in range(steps):
        reward = (step + 1) / steps
        line = {
            "step": step, "version": step, "t": time.time(), "reward": {"count": reward},
            "reward_mean": reward, "tokens_per_s": 1000.0 + step, "staleness_mean": 0.5, "staleness_max": 1,
            "wait_batch_s": 0.1, "train_s": 0.2, "publish_s": 0.05, "exposed_s": 0.01, "trajectories": 8,
            "counts": {"env_failed": step},
        }  # fmt: skip
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        tasks = {"count": {"reward": reward, "trajectories": 8 * step, "failed": step}}
        write_status(run, step=step + 1, steps=steps, tasks=tasks, tokens_per_s=1000.0)
        time.sleep(0.05)


def main() -> None:
    """Play the scene."""
    from mpi4py import MPI

    run, attempt = Path(sys.argv[1]), sys.argv[2]
    scene = (run / "scene").read_text() if (run / "scene").exists() else "done"
    stop: list[int] = []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN if scene == "deaf" else lambda *_: stop.append(1))
    if scene == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = MPI.COMM_WORLD
    rank, component = world.Get_rank(), os.environ["ROLLART_COMPONENT"]
    names = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "TMPDIR", "ROLLART_RUN_ID")
    about = {"rank": rank, "size": world.Get_size(), "component": component, "pid": os.getpid()}
    about |= {name: os.environ.get(name) for name in names}
    about["slurm"] = [name for name in os.environ if name.startswith("SLURM_")]
    (run / f"rank-{rank}.json").write_text(json.dumps(about))
    if scene == "orphan" and rank == 1:
        # Two forks: the sleeper's parent is gone at once and it is nobody's descendant.
        line = "setsid sleep 300 </dev/null >/dev/null 2>&1 & echo $! >orphan; exit"
        subprocess.run(["sh", "-c", line], cwd=run, check=True)
    world.Barrier()
    coordinator = rank == 0
    if scene == "never-ready":
        time.sleep(300)
    if scene == "crash" and rank == 1:
        sys.exit("the fake crashed on purpose")
    if coordinator:
        write_status(run)
    if scene == "fail" and rank == 1:
        record = {"component": component, "rank": rank, "host": "here", "error": "out of luck"}
        (run / "logs" / attempt / f"{component}-{rank}.log").write_text("out of luck\n")
        (run / "logs" / attempt / "failure.json").write_text(json.dumps(record))
        os._exit(3)
    if scene == "fail":
        os._exit(0)  # as real ranks after a loss: MPI_Finalize would wait for the dead one
    if scene == "silent":
        time.sleep(300)
    if coordinator and scene in ("done", "orphan", "linger"):
        train(run, 3)
        write_status(run, state="done", step=3)
    if scene == "linger" and rank == 1:
        time.sleep(300)
    while scene in ("forever", "deaf") and not stop:
        if coordinator:
            write_status(run)
        time.sleep(0.05)
    if stop and coordinator:
        write_status(run, state="interrupted", message="stopped on request")


if __name__ == "__main__":
    main()
