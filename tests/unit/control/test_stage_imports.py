from __future__ import annotations

import gc

import pytest

from asyncrl.control.stage_imports import without_looking_for_garbage


def test_no_garbage_is_looked_for_while_a_stage_imports_nor_later_among_what_came():
    frozen = gc.get_freeze_count()
    with without_looking_for_garbage():
        assert not gc.isenabled()
        came = [[] for _ in range(10_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(came)


def test_it_is_looked_for_again_where_an_import_failed():
    with pytest.raises(ImportError), without_looking_for_garbage():
        raise ImportError
    assert gc.isenabled()
