import errno
import fcntl

from asyncrl.folders import OwnedFolder, sweep


def test_where_a_file_system_has_no_locks_a_folder_is_made_and_no_sweep_removes_it(tmp_path, monkeypatch) -> None:
    def flock(_handle: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with OwnedFolder("mine-", tmp_path) as folder:
        sweep("mine-", tmp_path)
        assert folder.path.is_dir()
    assert not list(tmp_path.iterdir())
