from pathlib import Path

import pytest

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.errors import EngineConfigError, GenerationError
from asyncrl.generate.vllm.checkpoint import ModelFolder, read_folder
from asyncrl.generate.vllm.launch import check_settings, engine_arguments, parse_version, socket_folder, where_weights_are
from asyncrl.learner.model.policy import link_folder

FOLDER = ModelFolder(Path("model"), {}, 64, frozenset(), "float32", "llama", 32, 512)


def test_what_the_engine_depends_on_and_sequences_too_long_for_the_model_are_refused() -> None:
    with pytest.raises(EngineConfigError, match="may not set logprobs_mode"):
        check_settings(VLLMEngineConfig(arguments={"logprobs_mode": "raw_logprobs"}), 32)
    with pytest.raises(EngineConfigError, match="4096; the model was made for 512"):
        engine_arguments(VLLMEngineConfig(max_sequence_tokens=4096), FOLDER, on_cpu=False)


def test_vllm_uses_the_short_factors_of_longrope_as_the_learner_does(longrope_folder: Path) -> None:
    """It uses the long ones for every position if max_model_len is larger."""
    folder = read_folder(longrope_folder)
    assert engine_arguments(VLLMEngineConfig(max_sequence_tokens=16), folder, on_cpu=False)["max_model_len"] == 16
    with pytest.raises(GenerationError, match="17; the model was made for 16 positions"):
        engine_arguments(VLLMEngineConfig(max_sequence_tokens=17), folder, on_cpu=False)


def test_runs_of_one_model_have_one_path_for_vllm_s_compiled_code(tmp_path: Path) -> None:
    source, runs = tmp_path / "source", [tmp_path / "one", tmp_path / "two"]
    source.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (source / name).write_text("{}")
    for run in runs:
        run.mkdir()
        link_folder(source, run)
    assert [where_weights_are(run) for run in runs] == [source, source]
    assert where_weights_are(source) == source
    (source / "config.json").unlink()
    assert where_weights_are(runs[0]) == runs[0]


def test_what_a_version_can_do_is_known_an_untested_one_says_so_and_an_old_one_is_refused_with_what_works(caplog) -> None:
    for number, spans, tested in (
        ("0.26.0", False, True), ("0.31.4rc1", False, False), ("0.33.1.dev3+cpu", True, True), ("1.0", True, False),
    ):  # fmt: skip
        caplog.clear()
        assert parse_version(number).has_weight_versions == spans
        assert ("not tested" in caplog.text) != tested
    for number in ("0.25.9", "dev"):
        with pytest.raises(GenerationError, match=r"works with 0\.26, and with 0\.32 and newer"):
            parse_version(number)


def test_a_folder_for_sockets_that_cannot_be_made_is_named(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/tmp/no/such")
    with pytest.raises(GenerationError, match=r"/tmp/no/such: .* VLLM_RPC_BASE_PATH"):
        socket_folder()
