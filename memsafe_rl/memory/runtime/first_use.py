"""Makes early what a CUDA device makes when it is first used, and empties autograd's queues."""

from __future__ import annotations

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory

_SIDE = 16
"""Rows and columns of the product that makes cuBLAS's handles."""

_FLUSHES: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
"""Per device a scalar, a view of it and a gradient for that, from which a backward allocates nothing."""


def prepare_device(device: torch.device) -> None:
    """Makes cuBLAS's handles on a device, and a graph by which `flush_autograd` reaches its queue.

    Call it before weights are loaded: cuBLAS takes tens of MiB outside of PyTorch for each thread that multiplies, and
    autograd runs backward on a device in a thread of its own. Does nothing on a CPU.
    """
    if device.type == "cpu":
        return
    with torch.inference_mode(False), torch.enable_grad():
        try:  # one product forward, in this thread, and backward, in the device's
            square = torch.zeros(_SIDE, _SIDE, device=device, requires_grad=True)
            torch.autograd.grad((square @ square).sum(), square)
        except RuntimeError as error:
            # Later this status may mean a kernel's bad index too; nothing has run yet.
            if "CUBLAS_STATUS_NOT_INITIALIZED" not in str(error):
                raise
            message = f"CUDA out of memory. cuBLAS found no room for its handle on {device}: {error}"
            raise torch.OutOfMemoryError(message) from error
        if device not in _FLUSHES:
            scalar = torch.zeros((), device=device, requires_grad=True)
            _FLUSHES[device] = scalar, scalar.view(()), torch.ones((), device=device)


def flush_autograd() -> None:
    """Runs a backward of a scalar on the host and on each prepared device, behind all that a failed one left queued.

    A backward that raises leaves queued nodes, which hold its graph: in the calling thread those of the host, in
    autograd's own thread those of a device. The later a node was made, the earlier it runs, so the device's is an old
    one. On the device it allocates nothing.
    """
    with host_memory(), torch.inference_mode(False), torch.enable_grad():
        scalar = torch.zeros((), requires_grad=True)
        torch.autograd.backward(scalar * 1.0)
        for leaf, view, gradient in _FLUSHES.values():
            torch.autograd.grad(view, leaf, gradient, retain_graph=True)
