"""What the package lists of itself; what a type checker sees of it is in integration/run/test_wheel.py."""

import pytest

import asyncrl

NAMES = """RunLostError SystemClock ids_to_bytes ids_from_bytes logprobs_to_bytes logprobs_from_bytes mask_from_bytes
    Run Server Session connect load_config parse_config configs"""


def test_the_package_lists_what_it_exports():
    assert all(getattr(asyncrl, name) is not None for name in asyncrl.__all__)
    assert set(dir(asyncrl)) >= {*asyncrl.__all__, "__version__", *NAMES.split()}
    assert asyncrl.configs.RunConfig is asyncrl.RunConfig
    with pytest.raises(AttributeError, match="module 'asyncrl' has no attribute 'nope'"):
        asyncrl.nope  # noqa: B018 - looking it up is the test
