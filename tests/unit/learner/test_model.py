import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.algorithm import LearnerConfig
from asyncrl.config.model import PretrainedModel, ScratchModel, WarmStart
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.model import build_scratch, made_ready, open_model, open_tokenizer, row_logprobs, save_model
from asyncrl.learner.rows import prepare
from asyncrl.learner.start import prepare_standing
from asyncrl.learner.step import train_step
from asyncrl.learner.tokenizer import character_tokenizer
from asyncrl.learner.warm_start import StartAbandoned, tokenise, warm_start
from asyncrl.models.attention import PACKED_ATTENTION

SMALL = ScratchModel(hidden_size=32, num_layers=1, num_heads=2, max_positions=32)
ALPHABET = "0123456789+="


def sums():
    return [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]


def test_character_tokenizer_round_trips_and_adds_nothing():
    tokenizer = character_tokenizer("ab\n é")
    ids = tokenizer("a é\nb")["input_ids"]
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "a é\nb"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode([*ids, 1], skip_special_tokens=True) == "a é\nb"


def test_a_character_outside_the_alphabet_is_an_error():
    with pytest.raises(Exception, match="UNK"):
        character_tokenizer("ab")("abc")


def test_an_empty_alphabet_is_refused():
    with pytest.raises(ValueError, match="empty alphabet"):
        character_tokenizer("")


def test_a_saved_scratch_model_opens_with_plain_transformers(tmp_path):
    model, tokenizer = build_scratch(SMALL, ALPHABET, seed=3)
    save_model(made_ready(model, LearnerConfig()), tokenizer, tmp_path)
    opened, reopened = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert opened.config._attn_implementation != PACKED_ATTENTION
    assert reopened("1+2=")["input_ids"] == tokenizer("1+2=")["input_ids"]
    assert reopened.decode(reopened("1+2=")["input_ids"]) == "1+2="
    assert (reopened.eos_token, reopened.pad_token, reopened.bos_token) == ("<eos>", "<pad>", None)
    assert opened.generation_config.eos_token_id == reopened.eos_token_id
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), opened.parameters(), strict=True))


def test_the_seed_decides_the_scratch_weights():
    first, second, other = (build_scratch(SMALL, ALPHABET, seed)[0] for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_opening_names_the_folder_and_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; `asyncrl model import`"):
        open_model(tmp_path / "nowhere", LearnerConfig())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors, no a tokenizer"):
        open_model(tmp_path, LearnerConfig())


def test_an_unknown_architecture_is_a_config_error(tmp_path):
    model, tokenizer = build_scratch(SMALL, ALPHABET, seed=0)
    save_model(model, tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_model", "architectures": []}))
    with pytest.raises(ConfigError, match="cannot open the model"):
        open_model(tmp_path, LearnerConfig())


def test_a_model_that_scales_its_logits_is_refused():
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, logit_scale=0.25
    )
    with pytest.raises(ConfigError, match='"cohere" cannot be trained'):
        made_ready(CohereForCausalLM(config), LearnerConfig())


def test_dropout_is_switched_off():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    made_ready(model, LearnerConfig())
    ids = torch.arange(8)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_warm_start_lowers_the_loss_and_repeats_bit_for_bit():
    weights = []
    for _ in range(2):
        model, tokenizer = build_scratch(SMALL, ALPHABET, seed=0)
        made_ready(model, LearnerConfig())
        config = WarmStart(steps=40, batch_size=32, learning_rate=3e-3)
        early = warm_start(model, tokenise(sums(), tokenizer), WarmStart(steps=1, batch_size=32), LearnerConfig(), 0)
        metrics = warm_start(model, tokenise(sums(), tokenizer), config, LearnerConfig(), seed=0)
        assert metrics["warm_start/loss"] < 0.85 * early["warm_start/loss"]
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_completions_end_with_the_end_of_sequence_token():
    tokenizer = character_tokenizer(ALPHABET)
    (example,) = tokenise([("1+1=", "2")], tokenizer)
    assert example.completion_ids.tolist() == [tokenizer("2")["input_ids"][0], tokenizer.eos_token_id]
    assert len(example.prompt_ids) == 4


def test_warm_start_without_examples_is_a_config_error(tmp_path):
    model = ScratchModel(hidden_size=32, num_layers=1, num_heads=2, warm_start=WarmStart(steps=1))
    with pytest.raises(ConfigError, match="no worked examples"):
        prepare_standing(RunConfig(model=model), tmp_path, list, ALPHABET)


def test_the_initial_model_is_made_once(tmp_path):
    model = ScratchModel(hidden_size=32, num_layers=1, num_heads=2, warm_start=WarmStart(steps=3, batch_size=8))
    config = RunConfig(model=model)
    first = prepare_standing(config, tmp_path, sums, ALPHABET)
    assert first.metrics["warm_start/steps"] == 3

    def never():
        raise AssertionError("a second warm start")

    second = prepare_standing(config, tmp_path, never, ALPHABET)
    assert second.metrics == {}
    assert second.version == 0
    assert all(
        torch.equal(a, b) for a, b in zip(first.trainee.model.parameters(), second.trainee.model.parameters(), strict=True)
    )


def test_an_abandoned_warm_start_leaves_no_model_behind(tmp_path):
    model = ScratchModel(hidden_size=32, num_layers=1, num_heads=2, warm_start=WarmStart(steps=3))
    with pytest.raises(StartAbandoned):
        prepare_standing(RunConfig(model=model), tmp_path, sums, ALPHABET, stopped=lambda: True)
    assert not (tmp_path / "model").exists()


def test_a_pretrained_folder_becomes_the_run_s_model(tmp_path):
    model, tokenizer = build_scratch(SMALL, ALPHABET, seed=5)
    (tmp_path / "source").mkdir()
    save_model(model, tokenizer, tmp_path / "source")
    config = RunConfig(model=PretrainedModel(path=str(tmp_path / "source")))
    standing = prepare_standing(config, tmp_path / "run", list, "")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), standing.trainee.model.parameters(), strict=True))
    assert open_tokenizer(tmp_path / "run" / "model")("1+2=")["input_ids"] == tokenizer("1+2=")["input_ids"]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_symlink()
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_lower_precision_leaves_rotary_frequencies_as_transformers_has_them(tmp_path, dtype):
    model, tokenizer = build_scratch(SMALL, ALPHABET, seed=0)
    save_model(model, tokenizer, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    plain.set_attn_implementation(PACKED_ATTENTION)
    ours, ids = open_model(tmp_path, LearnerConfig(dtype=dtype)), torch.arange(12)[None]
    assert ours.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {parameter.dtype for parameter in ours.parameters()} == {getattr(torch, dtype)}
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, plain(ids).logits)


def test_gradient_checkpointing_changes_no_bit_of_a_packed_row_s_gradients(kit):
    batch, gradients = kit.batch(kit.samples(groups=2)), []
    for checkpointing in (False, True):
        model = made_ready(kit.model(), LearnerConfig(gradient_checkpointing=checkpointing))
        assert model.is_gradient_checkpointing == checkpointing
        for row in prepare(batch).rows:
            logprobs, _ = row_logprobs(model, row, temperature=1.0, chunk_tokens=16)
            logprobs.exp().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_float32_head_is_in_force_where_it_is_asked_for(tmp_path, kit):
    model, tokenizer = build_scratch(SMALL, ALPHABET, seed=0)
    save_model(model, tokenizer, tmp_path)
    half, full = (open_model(tmp_path, LearnerConfig(dtype="bfloat16"), fp32_head=headed) for headed in (False, True))
    hidden = torch.randn(9, 32, dtype=torch.bfloat16)
    exact = hidden.double() @ half.lm_head.weight.double().T
    errors = [(opened.get_output_embeddings()(hidden).double() - exact).abs().max() for opened in (half, full)]
    assert errors[1] < 1e-3 * errors[0]
    (tmp_path / "again").mkdir()
    save_model(full, tokenizer, tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(half.parameters(), again.parameters(), strict=True))


def test_the_learner_s_choice_of_the_fused_kernel_reaches_the_output_layer(kit):
    config = kit.config({}, {"logprobs": "fused"})
    with pytest.raises(ConfigError, match=r"learner.logprobs = 'fused' runs on CUDA"):
        train_step(kit.trainee(kit.model(), config), prepare(kit.batch(kit.samples())), config)
