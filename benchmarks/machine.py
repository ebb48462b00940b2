"""Names the machine and the versions behind a figure."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


def describe_machine() -> dict[str, str]:
    """Returns the device, the cores and the versions of what was measured.

    Returns:
        Plain text by name, ready for a results file.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "device": device,
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **versions,
    }
