import pytest

from asyncrl.errors import CodecError
from asyncrl.transport.packets import ParcelHead, parse_parcel


@pytest.mark.parametrize(("shape", "body"), [
    ([0, 0, 4], [b"123"]), ([0, 0, 4], [b"12345"]), ([0, 0, 4], [b"1234", b"more"]), ([0, 0], [b"1234"]), ([2, 0, 4], [b"1234"]),
    ([0, -1, 4], [b"1234"]), ([0, 0, -4, 0, 1, 8], [b"1234"]), ([0, 0, 4], []), ([], [b"1234"]), ([0, 0, 1 << 70], [b"1234"]),
])  # fmt: skip
def test_a_shape_that_does_not_fit_its_frames_is_refused(shape, body):
    with pytest.raises(CodecError):
        parse_parcel(ParcelHead("session", [], [], shape), body)
