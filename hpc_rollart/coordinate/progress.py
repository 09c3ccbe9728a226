"""What the run shows of itself: the line of metrics.jsonl for each step, and status.json while it runs."""

import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from hpc_rollart.messages import Batch, Finished, Installed, StepDone

# Throughput is shown over this window: long enough to be calm, short enough to show a stall.
_RATE_WINDOW_S = 10.0


@dataclass
class TaskProgress:
    """One task so far; `reward` is its mean in the last step that trained on it."""

    name: str
    finished: int = 0
    failed: int = 0
    reward: float | None = None


@dataclass
class Progress:
    """Collects what happens and says it in the two files' terms.

    Parameters
    ----------
    tasks
        Names of the tasks, in the config's order.
    steps
        Steps the run is to do.
    t_start
        When the attempt began, in Unix seconds; `restore` puts it back by the time that earlier ones worked.
    attempt, step
        Which attempt this is, and the steps done by those before.
    """

    tasks: list[str]
    steps: int
    t_start: float
    attempt: int = 0
    step: int = 0
    installed: dict[int, int] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    staleness: dict[str, float] = field(default_factory=dict)
    by_task: list[TaskProgress] = field(init=False)
    _first_version: int = field(init=False)
    _rate: deque[tuple[float, int]] = field(default_factory=deque)
    _batch: Batch | None = None
    # Task and turns of what has finished and was neither trained on nor dropped.
    _waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def __post_init__(self) -> None:
        self.by_task = [TaskProgress(name) for name in self.tasks]
        self._first_version = self.step

    @property
    def elapsed_s(self) -> float:
        """Seconds at work so far, those of earlier attempts included."""
        return time.time() - self.t_start

    def state(self, cut: Collection[int]) -> dict[str, Any]:
        """What a later attempt needs to count on from here, as JSON-able data.

        Parameters
        ----------
        cut
            Trajectories of the batch that was just cut. What else has finished is in groups that are still
            open, which the later attempt does anew, and is not counted here.
        """
        anew = Counter(task for number, (task, _) in self._waiting.items() if number not in cut)
        return {
            "elapsed_s": self.elapsed_s,
            "tasks": [
                [task.finished - anew[index], task.failed, task.reward]
                for index, task in enumerate(self.by_task)
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Count on from what `state` gave."""
        self.t_start -= state["elapsed_s"]
        for task, (finished, failed, reward) in zip(self.by_task, state["tasks"], strict=True):
            task.finished, task.failed, task.reward = finished, failed, reward

    def begin(self, now: float) -> None:
        """The ranks are ready; steps are paced from here."""
        self._step_times.append(now)

    def finished(self, task: int, message: Finished) -> None:
        """An episode was scored."""
        self.by_task[task].finished += 1
        self._waiting[message.trajectory] = (task, message.turns)
        self._rate.append((time.time(), message.sampled))

    def failed(self, task: int) -> None:
        """An episode failed."""
        self.by_task[task].failed += 1

    def dropped(self, trajectory: int) -> None:
        """A finished trajectory will not be trained on."""
        self._waiting.pop(trajectory, None)

    def weights_installed(self, source: int, message: Installed) -> None:
        """A generator serves a new version."""
        newest = message.version > max(self.installed.values(), default=self._first_version)
        self.installed[source] = message.version
        # The generator that paused longest says what the version cost.
        self.waits["exposed_s"] = max(message.exposed_s, 0.0 if newest else self.waits.get("exposed_s", 0.0))

    def batch_cut(self, batch: Batch) -> None:
        """The trainer was told what to train on."""
        self._batch = batch
        lags = [item.staleness for item in batch.items]
        self.staleness = {"mean": sum(lags) / len(lags), "max": max(lags)}

    def step_done(self, message: StepDone, counts: dict[str, int]) -> dict[str, Any]:
        """Close a step and return its line of metrics.jsonl."""
        batch, trained = self._batch, message.metrics
        assert batch is not None and batch.step == message.step
        rewards: dict[str, float] = {}
        turns: dict[str, float] = {}
        for index, task in enumerate(self.by_task):
            items = [item for item in batch.items if item.task == index]
            if items:
                task.reward = sum(item.reward for item in items) / len(items)
                rewards[task.name] = task.reward
                turns[task.name] = sum(self._waiting.pop(i.trajectory)[1] for i in items) / len(items)
        now = time.time()
        self.step = message.step + 1
        self._step_times.append(now)
        self.waits |= {
            "trainer_batch_s": trained["wait_batch_s"],
            "trainer_train_s": trained["train_s"],
            "publish_s": trained.get("publish_s", 0.0),
        }
        lags = Counter(item.staleness for item in batch.items)
        return {
            "step": message.step,
            "attempt": self.attempt,
            "version": batch.version,
            "t": now,
            "reward": rewards,
            "reward_mean": sum(item.reward for item in batch.items) / len(batch.items),
            **trained,
            "exposed_s": self.waits.get("exposed_s"),
            "staleness_mean": self.staleness["mean"],
            "staleness_max": self.staleness["max"],
            "staleness_hist": {str(lag): count for lag, count in sorted(lags.items())},
            "trajectories": len(batch.items),
            "turns_mean": turns,
            "tokens_per_s": self.tokens_per_s(now),
            "counts": counts,
        }

    def tokens_per_s(self, now: float) -> float:
        """Sampled tokens a second over the last ten seconds."""
        while self._rate and self._rate[0][0] < now - _RATE_WINDOW_S:
            self._rate.popleft()
        span = min(_RATE_WINDOW_S, max(now - self.t_start, 1.0))
        return sum(sampled for _, sampled in self._rate) / span

    def status(self, state: str, message: str, in_flight: int, groups: dict[str, int]) -> dict[str, Any]:
        """Return the content of status.json."""
        now = time.time()
        return {
            "state": state,
            "attempt": self.attempt,
            "step": self.step,
            "steps": self.steps,
            "t": now,
            "t_start": self.t_start,
            "eta_s": self._eta_s(),
            "version": min(self.installed.values(), default=self._first_version),
            "tasks": {
                task.name: {"reward": task.reward, "trajectories": task.finished, "failed": task.failed}
                for task in self.by_task
            },
            "tokens_per_s": self.tokens_per_s(now),
            "staleness": self.staleness,
            "in_flight": in_flight,
            "groups": groups,
            "waits": self.waits,
            "message": message,
        }

    def _eta_s(self) -> float | None:
        """Steps left at the pace of the last ones."""
        if len(self._step_times) < 3:
            return None
        pace = (self._step_times[-1] - self._step_times[0]) / (len(self._step_times) - 1)
        return pace * (self.steps - self.step)
