"""What a rank finds out about its GPUs: how many a library sees, and whether NCCL joins all ranks'."""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

# Without one of these there is no driver, and loading a large library to be told so takes seconds.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")


def device_count() -> int | None:
    """Return how many GPUs this process sees, or None where there is no driver or no library to ask."""
    if not any(Path(path).exists() for path in _DRIVERS):
        return None
    with contextlib.suppress(Exception):  # no CuPy, or one that does not fit the driver: torch may
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    with contextlib.suppress(Exception):
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    return None


def why_not_nccl() -> str:
    """Return why this process cannot use NCCL, or nothing if it can."""
    if not any(Path(path).exists() for path in _DRIVERS):
        return "no GPU"
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        return f"no CuPy ({error})"
    if not nccl.available:
        return "CuPy has no NCCL"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "no GPU"
    except Exception as error:
        return f"no GPU works ({error})"


def measure_nccl(comm: "MPI.Comm", size: int) -> dict[str, Any]:
    """Broadcast over the first GPUs of all ranks of `comm`, which all call this.

    Parameters
    ----------
    size
        Bytes of the broadcast.

    Returns
    -------
    dict
        `ranks`, and `mb_s` (megabytes a second), or `skipped` (why it was not tried), or `error`.
    """
    reasons = comm.allgather(why_not_nccl())
    found: dict[str, Any] = {"ranks": comm.size}
    if any(reasons):
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        return found | {"skipped": reasons[rank]}
    try:
        seconds, wrong = _broadcast(comm, size)
        error = "the bytes that came are not those that were sent" if wrong else ""
    except Exception as caught:  # NCCL's and CUDA's errors are many, and each is a finding
        seconds, error = 0.0, str(caught) or type(caught).__name__
    errors = comm.allgather(error)
    if any(errors):
        return found | {"error": next(text for text in errors if text)}
    return found | {"mb_s": size / max(comm.allgather(seconds)) / 1e6}


def _broadcast(comm: "MPI.Comm", size: int) -> tuple[float, bool]:
    """Return seconds of the fastest of three broadcasts, and whether the content came out wrong."""
    import cupy
    from cupy.cuda import nccl

    cupy.cuda.Device(0).use()
    unique = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
    group = nccl.NcclCommunicator(comm.size, unique, comm.rank)
    data = cupy.full(size, 7 if comm.rank == 0 else 0, dtype=cupy.uint8)
    stream = cupy.cuda.Stream.null
    times = []
    for _ in range(3):
        comm.Barrier()
        began = time.perf_counter()
        group.bcast(data.data.ptr, size, nccl.NCCL_UINT8, 0, stream.ptr)
        stream.synchronize()
        times.append(time.perf_counter() - began)
    wrong = bool((data != 7).any())
    group.destroy()
    return min(times), wrong
