"""Samples that people can read: which are kept, where, and how many."""

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from asyncrl.observe.samples import TOKENS_FILE, TokenFile, TokenRow, kept_members, read_tokens, rows_of
from asyncrl.observe.sinks import TensorBoardSink
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample, ids_to_bytes, logprobs_to_bytes
from tests.builders import make_sample


def group_of(group_id: int, size: int = 3) -> ScoredGroup:
    samples = [make_sample(group_id, index, versions=[4, 5 + index], text=f"answer {index} | x") for index in range(size)]
    members = tuple(ScoredSample(sample, 0.5, {"exact": 1.0}) for sample in samples)
    return ScoredGroup(group_id, Prompt(f"p{group_id}", text="1+1="), members)


def test_every_group_has_a_row_before_any_has_two_and_extremes_are_kept():
    rows = rows_of(7, [group_of(group_id) for group_id in range(4)], most=6)
    assert [(row.group_id, row.index) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]
    members = [(group_id, index, 1.0 - (group_id, index).count(2)) for group_id in range(3) for index in range(3)]
    assert kept_members(members, 2) == [0, 3, 8]
    assert kept_members(members, 0) == []
    assert (rows[-1].step, rows[-1].oldest_version, rows[-1].newest_version) == (7, 4, 6)
    assert (rows[0].prompt, rows[0].text, rows[0].reward, rows[0].parts) == ("1+1=", "answer 0 | x", 0.5, {"exact": 1.0})


def token_row(step: int, index: int, first: int, ids: list[int]) -> TokenRow:
    floats = logprobs_to_bytes([-0.5] * len(ids))
    return TokenRow(step, 1, index, 0.5, first, ids_to_bytes(ids), ids_to_bytes(ids), *[floats] * 5, flags=b"\1" * len(ids))


def test_tokens_are_read_while_they_are_written_and_behind_a_torn_line(tmp_path):
    asked = []
    file = TokenFile(tmp_path, lambda token: asked.append(token) or f"<{token}>")
    file.write([token_row(3, 0, 0, [7, 7, 9]), token_row(4, 0, 0, [1]), token_row(4, 0, 1, [2]), token_row(4, 1, 0, [7])])
    found = read_tokens(tmp_path, 4)
    assert {key: [row.texts for row in rows] for key, rows in found.items()} == {(1, 0): [("<1>",), ("<2>",)], (1, 1): [("<7>",)]}
    assert sorted(asked) == [1, 2, 7, 9]
    with (tmp_path / TOKENS_FILE).open("ab") as torn:
        torn.write(b'{"step":4,"gro')
    again = TokenFile(tmp_path, str)
    again.write([token_row(4, 0, 0, [5])])  # the step is repeated after a crash
    file.close()
    again.close()
    assert [row.texts for row in read_tokens(tmp_path, 4)[1, 0]] == [("5",)]
    assert not read_tokens(tmp_path, 5)


def test_tensorboard_gets_a_table(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write_samples(3, 1.0, rows_of(3, [group_of(1)], most=2))
    sink.close()
    (file,) = tmp_path.iterdir()
    (event,) = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    text = event.summary.value[0].tensor.string_val[0].decode()
    assert event.step == 4
    assert "| g1.0 | 1+1= | answer 0 \\| x | 0.5 |" in text
