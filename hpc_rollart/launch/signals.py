"""Signals that ask a program to stop: collected instead of died of."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def collected(numbers: Sequence[signal.Signals]) -> Iterator[Sequence[signal.Signals]]:
    """Collect signals while the context is open; yields those that came so far, the last one last.

    A signal that is ignored stays so: nohup ignores SIGHUP on purpose. Only the main thread may handle
    signals; in another one nothing is collected.
    """
    came: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(signal.Signals(number))

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
