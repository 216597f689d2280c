"""How prompts are laid into prefill forwards, and which rows may lend their keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.generate.transformers.scheduler import InFlight, SlotDecoder
from asyncrl.schema.samples import SamplingParams
from tests.contract.engine_cases import make_model, tensors_of

SLOTS = 4


class CountingModel(SlotModel):
    """Notes the rows that were prefilled and the tokens that were prefilled in them, and the copies between rows."""

    def prefill(self, sequences) -> None:
        sequences = list(sequences)
        self.prefilled |= {row: len(ids) - shared for row, ids, shared in sequences if len(ids) > shared}
        super().prefill(sequences)

    @classmethod
    def made(cls, folder: Path) -> CountingModel:
        model = cls.load(folder, TransformersEngineConfig(num_slots=SLOTS, max_sequence_tokens=256))
        copy_rows = model.cache.copy_rows
        model.prefilled, model.copied = {}, []

        def counted(copies) -> None:
            copies = list(copies)
            model.copied += copies
            copy_rows(copies)

        model.cache.copy_rows = counted
        return model


@pytest.fixture
def decoder(tmp_path: Path) -> SlotDecoder:
    make_model(0).save_pretrained(tmp_path)
    return SlotDecoder(CountingModel.made(tmp_path), SLOTS)


def step(decoder: SlotDecoder) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
    """Tokens that were prefilled by row, and copies."""
    decoder.model.prefilled, decoder.model.copied = {}, []
    decoder.step()
    return decoder.model.prefilled, decoder.model.copied


def submit(decoder: SlotDecoder, *names: str, group_key: str = "g", prompt: tuple[int, ...] = (4, 5, 6), most: int = 5) -> None:
    for name in names:
        decoder.submit(InFlight(EngineRequest(name, prompt, SamplingParams(max_new_tokens=most), 0, group_key), frozenset()))


def test_a_prompt_is_prefilled_once_a_group_and_copied_to_the_others(decoder: SlotDecoder) -> None:
    submit(decoder, "a", "b")
    submit(decoder, "c", group_key="other")
    submit(decoder, "d", prompt=(4, 5, 7))
    assert step(decoder) == ({0: 2, 2: 2, 3: 2}, [(0, 1, 2)])


def test_other_weights_lend_nothing_nor_does_a_prompt_that_is_computed_again_with_what_followed(decoder: SlotDecoder) -> None:
    submit(decoder, "a", group_key="gone", most=2)
    submit(decoder, "b", group_key="here", most=30)
    decoder.step()
    decoder.step()
    decoder.model.prefilled = {}
    decoder.load_weights(1, tensors_of(make_model(1)), "recompute")
    assert decoder.model.prefilled == {1: 4}
    submit(decoder, "c", group_key="gone")
    submit(decoder, "d", group_key="here")
    assert step(decoder) == ({0: 2, 2: 2}, [])
    decoder.load_weights(2, tensors_of(make_model(0)), "keep")
    submit(decoder, "e", group_key="here")
    assert step(decoder) == ({3: 2}, [])


def test_prompts_take_the_whole_pieces_that_they_begin_with_from_a_running_request(decoder: SlotDecoder) -> None:
    piece = decoder.model.piece_tokens
    system = tuple(2 + i % 50 for i in range(2 * piece))
    submit(decoder, "a", "b", prompt=(*system, 3, 4))
    submit(decoder, "c", group_key="other", prompt=(*system, 5, 6, 7))
    submit(decoder, "d", group_key="half", prompt=(*system[: piece + 9], 1, 1), most=1)
    prefilled, copied = step(decoder)
    assert prefilled == {0: 2 * piece + 1, 2: 2, 3: 10}
    assert sorted(copied) == [(0, 1, 2 * piece + 1), (0, 2, 2 * piece), (0, 3, piece)]
    submit(decoder, "e", group_key="more", prompt=(*system, 9))
    assert step(decoder) == ({}, [(0, 3, 2 * piece)])


def test_a_prefix_that_was_computed_under_other_weights_is_not_taken(decoder: SlotDecoder) -> None:
    system = tuple(2 + i % 50 for i in range(decoder.model.piece_tokens))
    submit(decoder, "a", prompt=(*system, 3, 4), most=30)
    decoder.step()
    decoder.load_weights(1, tensors_of(make_model(1)), "keep")
    submit(decoder, "b", prompt=(*system, 5, 6))
    assert step(decoder) == ({1: len(system) + 1}, [])
    submit(decoder, "c", prompt=(*system, 7, 8))
    assert step(decoder) == ({2: 1}, [(1, 2, len(system))])
