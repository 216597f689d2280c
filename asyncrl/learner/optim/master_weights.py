"""Master weights: the tensors that optimizers change, and the copies of gradients to them and of weights back.

A float32 parameter on the learner's device is its own master. Otherwise the master is a float32 copy, because at RL learning
rates an update of a bfloat16 or float16 parameter rounds to nothing; the gradients of all micro-batches then add up in float32
on the parameter's device.

A copy starts at a random value that rounds to the parameter, not at the rounded value itself. From the rounded value, a 16-bit
weight would not change until its updates add up to half of a rounding step: for a weight of 0.1 in bfloat16 that is 2e-4, or ten
full updates at a rate of 2e-5. With random starts the rounded weights follow the updates from the first one on, on average.

With offload the copy is in host memory (pinned if the parameter is on CUDA), and gradients are copied bucket by bucket; the next
bucket is copied while the host works on this one.

Invariant: on a CPU the location of a master changes no bit.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from asyncrl.learner.ranks.group import divided_like

FULL_PRECISION = (torch.float32, torch.float64)
BUCKET_ELEMENTS = 16 << 20
"""Two staging buffers of 64 MiB of float32 gradients each."""


class Master:
    """One trained parameter of the model, and the tensor that its optimizer changes instead."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, *, on_host: bool) -> None:
        self.parameter = parameter
        self._sums_by_itself = parameter.dtype in FULL_PRECISION
        self._sum: torch.Tensor | None = None
        if not self._sums_by_itself:
            # Weak, because the garbage collector does not see a parameter's hooks: it would free neither master nor parameter.
            add_up = weakref.WeakMethod(self._add_up)

            def hook(source: torch.Tensor) -> None:
                if (method := add_up()) is not None:
                    method(source)

            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.trained = parameter
        if on_host or not self._sums_by_itself:
            values = parameter.detach() if self._sums_by_itself else spread(parameter.detach(), name)
            copy = values.to(device="cpu" if on_host else None, copy=self._sums_by_itself)
            self.trained = torch.nn.Parameter(copy.pin_memory() if on_host and parameter.is_cuda else copy)

    @property
    def is_copy(self) -> bool:
        """Whether the optimizer changes a copy, which must be written back and saved."""
        return self.trained is not self.parameter

    @property
    def gradient(self) -> torch.Tensor | None:
        """The sum of the gradients since the last `drop_gradient`, on the parameter's device."""
        return self.parameter.grad if self._sums_by_itself else self._sum

    def drop_gradient(self) -> None:
        """Drop the gradients."""
        self.parameter.grad = self._sum = self.trained.grad = None

    def _add_up(self, source: torch.Tensor) -> None:
        assert source.grad is not None
        gradient = source.grad.float()
        self._sum = gradient if self._sum is None else self._sum.add_(gradient)
        source.grad = None


def spread(rounded: torch.Tensor, name: str) -> torch.Tensor:
    """Return float32 values drawn uniformly from the values that round to the given 16-bit ones.

    The same name gives the same values on one kind of device. Zeros do not change, nor do a quarter of the powers of two.

    Source: dithered quantization (Schuchman 1964): with an offset uniform over a step, rounding has no error on average.
    """
    exact = rounded.float()
    device = torch.device("cpu") if isinstance(rounded, DTensor) else rounded.device  # the same for any number of ranks
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    noise = divided_like(torch.rand(rounded.shape, generator=generator, device=device).sub_(0.5), rounded)
    step = torch.finfo(rounded.dtype).eps * exact.abs().log2().floor().exp2()
    moved = exact + noise * step
    return torch.where(moved.to(rounded.dtype) == rounded, moved, exact)


def buckets_of(masters: Sequence[Master], bucket_elements: int = BUCKET_ELEMENTS) -> list[list[Master]]:
    """Cut masters, in order, into buckets of at most `bucket_elements` (a larger parameter has its own bucket)."""
    buckets: list[list[Master]] = []
    room = 0
    for master in masters:
        if not buckets or master.trained.numel() > room:
            buckets.append([])
            room = bucket_elements
        buckets[-1].append(master)
        room -= master.trained.numel()
    return buckets


class HostGradients:
    """Copies gradients to host memory, two buckets at a time."""

    def __init__(self, buckets: Sequence[Sequence[Master]]) -> None:
        self._buckets = buckets
        self._staging: tuple[torch.Tensor, ...] = ()

    def arrivals(self) -> Iterator[int]:
        """Yield each bucket's index once its masters hold their gradients; they are valid until the next one is requested."""
        arrived = [self._send(0)]
        for index, bucket in enumerate(self._buckets):
            if index + 1 < len(self._buckets):
                arrived.append(self._send(index + 1))
            if (event := arrived[index]) is not None:
                event.synchronize()
            yield index
            for master in bucket:
                master.trained.grad = None

    @torch.no_grad()
    def _send(self, index: int) -> torch.cuda.Event | None:
        """Start the copy of a bucket's gradients; return an event that marks its end, None if it is complete already."""
        device = self._buckets[index][0].parameter.device
        on_cuda = device.type == "cuda"
        if not self._staging:
            num_bytes = max(sum(map(_room, bucket)) for bucket in self._buckets)
            self._staging = tuple(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2))
        start = 0
        for master in self._buckets[index]:
            if (gradient := master.gradient) is not None:
                place = self._staging[index % 2][start : start + gradient.nbytes].view(gradient.dtype).view(gradient.shape)
                master.trained.grad = place.copy_(gradient, non_blocking=on_cuda)
            start += _room(master)
        if not on_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))  # the copies run on this stream, for any current device of the thread
        return event


def _room(master: Master) -> int:
    """Return the bytes of a gradient in the staging memory, rounded up to whole cache lines."""
    return -(-master.trained.nbytes // 64) * 64
