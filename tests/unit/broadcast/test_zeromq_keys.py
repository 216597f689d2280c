import pytest

from asyncrl.broadcast.zeromq import keys_of_run
from asyncrl.broadcast.zeromq_keys import CurveKeys, relay_keys
from asyncrl.transport.security import load_client_keys, make_keys


def test_a_run_with_keys_serves_weights_under_them(tmp_path):
    make_keys(tmp_path)
    public = load_client_keys(tmp_path).public.encode()
    keys = keys_of_run(tmp_path)
    assert (keys.public, keys.peers) == (public, (public,))


def test_a_run_without_keys_serves_weights_unencrypted(tmp_path):
    assert keys_of_run(tmp_path) is None


@pytest.mark.parametrize("keys", [None, CurveKeys(b"own", b"secret", (b"learner",))])
def test_a_generator_feeds_those_that_hold_its_own_pair(keys):
    assert relay_keys(keys) == (keys and CurveKeys(b"own", b"secret", (b"own",)))
