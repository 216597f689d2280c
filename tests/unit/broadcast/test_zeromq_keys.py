from asyncrl.broadcast.zeromq import keys_of_run
from asyncrl.transport.security import load_client_keys, make_keys


def test_a_run_with_keys_serves_weights_under_them(tmp_path):
    make_keys(tmp_path)
    public = load_client_keys(tmp_path).public.encode()
    keys = keys_of_run(tmp_path)
    assert (keys.public, keys.peers) == (public, (public,))


def test_a_run_without_keys_serves_weights_unencrypted(tmp_path):
    assert keys_of_run(tmp_path) is None
