"""Whether a hub of models answers, asked once and briefly, so that nobody waits for retries that cannot succeed."""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session
from transformers import AutoTokenizer

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 3.0  # how long a hub may take to answer at all; loading itself then has the client's own patience
_BELIEVED_SECONDS = 60  # how long an answer, or none, is believed


def places_for(name: str, **given: Any) -> dict[str, Any]:
    """Adds to the arguments of ``from_pretrained`` what keeps it from asking a hub that does not answer."""
    if given.get("local_files_only") is not None or constants.HF_HUB_OFFLINE or Path(name).exists():
        return dict(given)
    if _answers(constants.ENDPOINT, int(time.monotonic() // _BELIEVED_SECONDS)):
        return given
    return {**given, "local_files_only": True}


def loading_places_for(name: str, **given: Any) -> dict[str, Any]:
    """Adds the same for a network, whose loader looks for an adapter of that name too, and is told so apart."""
    found = places_for(name, **given)
    if found.get("local_files_only") and "adapter_kwargs" not in found:
        found["adapter_kwargs"] = {"local_files_only": True}
    return found


def read_tokenizer(name: str, **given: Any) -> Any:
    """Loads a tokenizer; raises OSError where a folder has none, of which transformers makes an empty one."""
    tokenizer = AutoTokenizer.from_pretrained(name, **places_for(name, **given))
    if len(tokenizer) < 2:
        raise OSError("there are no tokenizer files")
    return tokenizer


@lru_cache(maxsize=2)
def _answers(endpoint: str, now: int) -> bool:
    """Returns whether a hub answers anything; ``now`` makes the answer one of this minute."""
    del now
    try:
        get_session().head(endpoint, timeout=_PATIENCE_SECONDS)
    except Exception as error:  # the client's errors differ between its versions
        logger.info("%s does not answer (%s); only files that lie here are looked for", endpoint, error)
        return False
    return True
