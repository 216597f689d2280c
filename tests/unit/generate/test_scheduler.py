"""How prompts are laid into prefill forwards, which rows may lend their keys and values, and how tokens are drawn."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.generate.transformers.scheduler import DRAW_FIELDS, InFlight, SamplingBatch, SlotDecoder, sample
from asyncrl.schema.samples import SamplingParams
from tests.contract.engine_cases import MAX_TOKENS, make_model, tensors_of

SLOTS = 4
SMALL = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1}  # fmt: skip


class CountingModel(SlotModel):
    """Notes the tokens that were prefilled, by row; the rest was copied, rightly as tests/contract shows."""

    prefilled: dict[int, int]

    def prefill(self, sequences) -> None:
        sequences = list(sequences)
        self.prefilled |= {row: len(ids) - shared for row, ids, shared in sequences if len(ids) > shared}
        super().prefill(sequences)


def make_decoder(folder: Path, num_slots: int) -> SlotDecoder:
    make_model(0).save_pretrained(folder)
    model = CountingModel.load(folder, TransformersEngineConfig(num_slots=num_slots, max_sequence_tokens=256))
    model.prefilled = {}
    return SlotDecoder(model, num_slots)


@pytest.fixture
def window_folder(tmp_path: Path) -> Path:
    """A model with a sliding window of 49 tokens."""
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=49)).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def decoder(tmp_path: Path) -> SlotDecoder:
    return make_decoder(tmp_path, SLOTS)


def step(decoder: SlotDecoder) -> dict[int, int]:
    """Tokens that were prefilled by row."""
    decoder.model.prefilled = {}
    decoder.step()
    return decoder.model.prefilled


def submit(decoder: SlotDecoder, *names: str, group_key: str = "g", prompt: tuple[int, ...] = (4, 5, 6), most: int = 5) -> None:
    for name in names:
        decoder.submit(InFlight(EngineRequest(name, prompt, SamplingParams(max_new_tokens=most), 0, group_key), frozenset()))


@pytest.mark.parametrize(("name", "most"), [("folder", MAX_TOKENS), ("longrope_folder", 16), ("window_folder", 49)])
def test_sequences_beyond_the_positions_or_the_window_of_a_model_are_refused(name: str, most: int, request) -> None:
    folder = request.getfixturevalue(name)
    SlotModel.load(folder, TransformersEngineConfig(num_slots=1, max_sequence_tokens=most))
    with pytest.raises(GenerationError, match=rf"max_sequence_tokens is {most + 1}.*set it to at most"):
        SlotModel.load(folder, TransformersEngineConfig(num_slots=1, max_sequence_tokens=most + 1))


def test_a_prompt_is_prefilled_once_a_group_and_copied_to_the_others(decoder: SlotDecoder) -> None:
    submit(decoder, "a", "b")
    submit(decoder, "c", group_key="other")
    submit(decoder, "d", prompt=(4, 5, 7))
    assert step(decoder) == {0: 2, 2: 2, 3: 2}


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
    assert step(decoder) == {0: 2, 2: 2}
    decoder.load_weights(2, tensors_of(make_model(0)), "keep")
    submit(decoder, "e", group_key="here")
    assert step(decoder) == {3: 2}


def test_prompts_take_the_whole_pieces_they_begin_with_from_a_running_request_of_the_same_weights(decoder: SlotDecoder) -> None:
    piece = decoder.model.piece_tokens
    system = tuple(2 + i % 50 for i in range(2 * piece))
    submit(decoder, "a", "b", prompt=(*system, 3, 4))
    submit(decoder, "c", group_key="other", prompt=(*system, 5, 6, 7))
    submit(decoder, "d", group_key="half", prompt=(*system[: piece + 9], 1, 1), most=1)
    assert step(decoder) == {0: 2 * piece + 1, 2: 2, 3: 10}
    submit(decoder, "e", group_key="more", prompt=(*system, 9), most=1)
    assert step(decoder) == {}
    decoder.load_weights(1, tensors_of(make_model(1)), "keep")
    submit(decoder, "f", group_key="other weights", prompt=(*system, 8))
    assert step(decoder) == {3: 2 * piece}


def test_a_row_that_a_request_was_moved_to_lends_nothing_of_the_one_that_had_it_before(tmp_path: Path) -> None:
    decoder = make_decoder(tmp_path, 64)
    decoder.model.row_counts = (32, 64)
    system = tuple(2 + i % 50 for i in range(2 * decoder.model.piece_tokens))
    for row in range(41):
        submit(decoder, f"r{row}", most=1 if row == 3 else 50 if row in (0, 1, 2, 40) else 3)
    decoder.step()
    decoder.load_weights(1, tensors_of(make_model(1)), "keep")
    submit(decoder, "before", group_key="before", prompt=(*system, 3, 4), most=1)
    assert step(decoder) == {3: len(system) + 1}
    decoder.step()
    decoder.step()
    assert set(decoder._occupants) == {0, 1, 2, 3}
    submit(decoder, "after", group_key="after", prompt=(*system, 5))
    submit(decoder, "same", group_key="before", prompt=(*system, 3, 4))
    assert step(decoder) == {4: len(system), 5: 1}


def test_frequencies_follow_the_distribution() -> None:
    rows, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = SamplingBatch.of(np.array([(seed, 0.5, 1.0, 0) for seed in range(rows)], dtype=DRAW_FIELDS))
    tokens, _ = sample(logits.repeat(rows, 1), draws, np.zeros(rows, dtype=np.uint64))
    seen = np.bincount(tokens, minlength=4) / rows
    assert seen == pytest.approx(torch.softmax(logits / 0.5, -1).tolist(), abs=0.012)
