import pytest

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_versions import parse_version


@pytest.mark.parametrize(
    ("number", "release", "seeds", "flag", "spans"),
    [
        ("0.26.0", (0, 26), False, False, False),
        ("0.29.0", (0, 29), True, False, False),
        ("0.30.0", (0, 30), True, True, False),
        ("0.31.4rc1", (0, 31), True, True, False),
        ("0.32.0", (0, 32), True, True, True),
        ("0.33.1.dev3+cpu", (0, 33), True, True, True),
    ],
)
def test_every_version_of_the_range_is_known(number: str, release: tuple[int, int], seeds: bool, flag: bool, spans: bool) -> None:
    version = parse_version(number)
    assert version.release == release
    assert (version.keeps_seeds_beside_greedy, version.has_scale_out_flag, version.has_weight_versions) == (seeds, flag, spans)


@pytest.mark.parametrize("number", ["0.25.9", "0.34.0", "1.0", "dev"])
def test_others_are_refused_with_the_range(number: str) -> None:
    with pytest.raises(GenerationError, match=r"works with 0\.26 to 0\.33"):
        parse_version(number)
