"""Settings that are refused by name, with reason and remedy (`unsupported.yaml`), and other names of those we have."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from memsafe_rl.config import refusal
from memsafe_rl.config.declaring import unknown
from memsafe_rl.config.settings import ALGORITHMS, DECLARED
from memsafe_rl.errors import texts_beside

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """A setting that is refused by name."""

    reason: str  # why it is not here, as the end of a sentence
    remedy: str  # what to do instead, as a sentence
    # values that switch it off; these are harmless and accepted, the first is what reading it gives
    off: tuple[Any, ...] = ()
    draws_otherwise: bool = False  # whether another value would draw other tokens
    taken: bool = False  # whether any value is accepted, in one line that says why it changes nothing

    def admits(self, value: Any) -> bool:
        """Returns whether a value switches the setting off; values may be text, as from a command line."""
        return _written(value) in {_written(harmless) for harmless in self.off}


def _written(value: Any) -> str:
    text = str(value).strip().lower()
    return "none" if text == "null" else text


def _read_section(section: Mapping[str, Any]) -> dict[str, Refusal]:
    refusals = {}
    for entry in section["refused"]:
        for name, values in {**entry.get("harmless", {}), **{name: [] for name in entry.get("names", ())}}.items():
            off = (*section["always"], *(values if isinstance(values, list) else [values]))
            flags = {flag: entry.get(flag, False) for flag in ("draws_otherwise", "taken")}
            refusals[name] = Refusal(entry["reason"], entry.get("remedy", ""), off, **flags)
    return refusals


_TABLE = texts_beside(__file__, "unsupported.yaml")
REFUSED = _read_section(_TABLE["settings"])
"""Every setting of TRL 1.16's GRPOConfig that is not here (see `ALIASES` too), and some of earlier versions."""
REFUSED_OPTIONS = _read_section(_TABLE["generation_kwargs"])
"""Keys of transformers' `generate` that are not honoured."""
REFUSED_ENTRIES = _read_section(_TABLE["run_file"])
"""What scripts of TRL call an entry of a run file."""

ALIASES = {other: one.name for one in DECLARED.values() for other in one.also}
"""Other names that TRL and transformers have for a setting of ours; None under such a name means not given."""


def admit(
    given: Mapping[str, Any], known: Collection[str], refused: Mapping[str, Refusal] = REFUSED, what: str = "setting"
) -> dict[str, Any]:
    """Keeps the settings that are honoured, drops those that are off, and refuses the others by name."""
    kept: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in given.items():
        target = ALIASES.get(name, name)
        if target in known:
            if name in ALIASES and value is None:
                continue
            if target in kept and kept[target] != value:
                raise refusal("alias", name=name, value=value, other=written[target], what=what, first=kept[target])
            kept[target], written[target] = value, name
        elif target in refused:
            known_refusal = refused[target]
            if not known_refusal.admits(value) and known_refusal.taken:
                logger.warning("%s is %r, which changes nothing here: %s.", target, value, known_refusal.reason)
            elif not known_refusal.admits(value):
                raise refusal("refused", name=target, value=value, refused=known_refusal)
        elif what == "setting" and target in DECLARED:
            algorithm = next(name for name, settings in ALGORITHMS.items() if target in settings.declared)
            raise refusal("algorithm", name=name, value=value, algorithm=algorithm)
        else:
            others = [alias for alias, meant in ALIASES.items() if meant in known]
            raise unknown(name, known, what, also=[*refused, *others])
    return kept
