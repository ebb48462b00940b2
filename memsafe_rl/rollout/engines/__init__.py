"""A catalogue of rollout engines, one file each: the engine and its registration. A file added here is an engine added.

An engine of your own can also be passed from outside as ``rollout_engine``.
"""

from importlib import import_module
from pkgutil import iter_modules

from memsafe_rl.rollout.engine import ENGINES as ENGINES

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
