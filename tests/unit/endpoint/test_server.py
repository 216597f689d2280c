"""Which algorithms a session's endpoint and streams cannot serve."""

import pytest

import asyncrl


@pytest.mark.parametrize(("settings", "why"), [
    ({"dynamic_sampling": True}, "drop groups by their rewards"),
    ({"mask_truncated": True}, "mask_truncated drops a request whose choices are all cut off: set it to false"),
    ({"advantage": "remax"}, "'remax' needs a greedy sample in each group"),
])  # fmt: skip
def test_an_algorithm_that_would_drop_or_fail_requests_is_refused(tmp_path, settings, why):
    overrides = {"folder": str(tmp_path), **{f"algorithm.{name}": value for name, value in settings.items()}}
    with pytest.raises(asyncrl.ConfigError, match=why):
        asyncrl.Endpoint(asyncrl.Session("quickstart", overrides=overrides))


def test_a_stream_of_groups_without_the_greedy_sample_of_remax_is_refused(tmp_path):
    overrides = {"folder": str(tmp_path), "algorithm.advantage": "remax"}
    session = asyncrl.Session("quickstart", overrides=overrides)
    size = session.config.algorithm.group_size
    with pytest.raises(asyncrl.ConfigError, match=f"groups of n = {size} would lack it: leave n out"):
        session.stream(["1+1="], n=size)
    for n in (None, size + 1):
        with pytest.raises(asyncrl.RunError, match="not open"):
            session.stream(["1+1="], n=n)
