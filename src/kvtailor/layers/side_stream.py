"""Work of another thread beside the computation: on a GPU in a stream of its own; the CPU has nothing to order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream beside those that compute on a device; None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def branch(job: Callable[[], T], stream: torch.cuda.Stream | None) -> Branch[T]:
    """A job that another thread will run, once everything is done that the calling thread has asked the device for.

    Parameters
    ----------
    job : what to run.
    stream : from :func:`side_stream`.
    """
    return Branch(job) if stream is None else StreamBranch(job, stream)


class Branch(Generic[T]):
    """A job on the CPU, where what a function was asked for is done when it returns.

    Parameters
    ----------
    job : what to run. It is held, with the tensors that it reads, as long as the branch is.
    """

    def __init__(self, job: Callable[[], T]) -> None:
        self.job = job

    def run(self) -> T:
        """Run the job; called by the other thread, once."""
        return self.job()

    def join(self) -> None:
        """Let what the calling thread asks for from now on come after the job, which has returned or failed."""

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the calling thread use and free tensors that the job made."""


class StreamBranch(Branch[T]):
    """A job on a GPU, in a stream of its own. The GPU waits, no thread does.

    Parameters
    ----------
    job : what to run.
    stream : where.
    """

    def __init__(self, job: Callable[[], T], stream: torch.cuda.Stream) -> None:
        super().__init__(job)
        self.stream = stream
        self._ready = torch.cuda.current_stream(stream.device).record_event()
        self._done = torch.cuda.Event()

    def run(self) -> T:
        """Run the job; called by the other thread, once."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self._ready)
            try:
                return self.job()
            finally:  # a job that failed may have kernels under way that read
                self._done.record(self.stream)

    def join(self) -> None:
        """Let what the calling thread asks for from now on come after the job, which has returned or failed."""
        torch.cuda.current_stream(self.stream.device).wait_event(self._done)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the calling thread use and free tensors that the job made.

        Memory that is free again goes back to the stream in which it was taken, which must not write to it while this
        thread's stream still reads.
        """
        compute = torch.cuda.current_stream(self.stream.device)
        for tensor in tensors:
            tensor.record_stream(compute)
