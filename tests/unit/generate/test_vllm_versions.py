import logging

import pytest

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm.versions import parse_version


@pytest.mark.parametrize(
    ("number", "release", "flag", "spans", "tested"),
    [
        ("0.26.0", (0, 26), False, False, True),
        ("0.31.4rc1", (0, 31), True, False, False),
        ("0.32.0", (0, 32), True, True, True),
        ("0.33.1.dev3+cpu", (0, 33), True, True, True),
        ("1.0", (1, 0), True, True, False),
    ],
)
def test_what_a_version_can_do_is_known_and_an_untested_one_says_so(number, release, flag, spans, tested, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        version = parse_version(number)
    assert version.release == release
    assert (version.has_scale_out_flag, version.has_weight_versions) == (flag, spans)
    assert ("not tested" in caplog.text) != tested


@pytest.mark.parametrize("number", ["0.25.9", "dev"])
def test_others_are_refused_with_what_works(number: str) -> None:
    with pytest.raises(GenerationError, match=r"works with 0\.26, and with 0\.32 and newer"):
        parse_version(number)
