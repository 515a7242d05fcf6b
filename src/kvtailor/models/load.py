"""One way to load any model: an embedded one, a folder, a GGUF file or a name on the Hugging Face hub."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtailor.errors import ModelError
from kvtailor.models.fetch import EMBEDDED, fetch, model_home, replace_folder
from kvtailor.models.gguf import load_gguf
from kvtailor.models.whisper import load_ctranslate2_whisper

DEFAULT = "smollm2"
HUB_TIMEOUT = 10.0  # seconds
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
ALLOWED = f"a folder with config.json, a .gguf file, a hub name, or an embedded model ({', '.join(sorted(EMBEDDED))})"


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, with what makes its inputs.

    Parameters
    ----------
    name
        What was asked for.
    model
        In evaluation mode, on its device.
    tokenizer
        Of the text the model reads or writes.
    feature_extractor
        For a model that hears, turns a waveform into its input; else None.
    processor
        For a model that sees or hears and ships one, tokenizer and extractors in one; else None.
    """

    name: str
    model: Any
    tokenizer: Any
    feature_extractor: Any | None = None
    processor: Any | None = None


def load(
    name: str | os.PathLike[str] = DEFAULT,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    home: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Loaded:
    """Load a model by name or path.

    An embedded model is fetched at its first use and kept as a converted folder, which later loads read directly.

    Parameters
    ----------
    name
        ``smollm2``, ``whisper-tiny.en``, a folder with ``config.json``, a ``.gguf`` file, or a hub name.
    dtype
        Of the weights.
    device
        Where the model is put.
    home
        Where embedded models live, see :func:`kvtailor.models.fetch.model_home`.
    progress
        Show a line while an embedded model is fetched.

    Raises
    ------
    ModelError
        The name is none of the allowed, or what it names cannot be fetched, read or put on the device.
    """
    name = os.fspath(name)
    if not dtype.is_floating_point:
        raise ModelError(f"{name}: dtype {dtype} cannot hold weights; allowed: torch.float32, bfloat16 or float16")
    if name in EMBEDDED:
        loaded = _load_pretrained(name, str(converted_folder(name, home, progress=progress)), dtype)
    else:
        loaded = _load_named(name, dtype)
    try:
        loaded.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"{name}: the model cannot be put on device {str(device)!r}: {error}") from error
    return loaded


def _load_named(name: str, dtype: torch.dtype) -> Loaded:
    path = Path(name).expanduser()
    if path.is_dir():
        return _load_folder(name, path, dtype)
    if path.suffix.lower() == ".gguf" or path.is_file():
        model, tokenizer = load_gguf(path, dtype)
        return Loaded(name, model, tokenizer)
    if not HUB_NAME.fullmatch(name):
        raise ModelError(f"{name!r}: no such file or folder, and no hub name; allowed: {ALLOWED}")
    return _load_hub(name, dtype)


def _load_hub(name: str, dtype: torch.dtype) -> Loaded:
    if is_hub_reachable(name):
        return _load_pretrained(name, name, dtype, local_only=False)
    try:
        return _load_pretrained(name, name, dtype)
    except ModelError as error:
        raise ModelError(
            f"{name!r}: no such path, not in the hub's cache, and the hub is not reachable; allowed: {ALLOWED}"
        ) from error


def _load_folder(name: str, folder: Path, dtype: torch.dtype) -> Loaded:
    if (folder / "config.json").is_file() and (folder / "model.bin").is_file():
        return Loaded(name, *load_ctranslate2_whisper(folder, dtype))
    if not (folder / "config.json").is_file():
        holds = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise ModelError(f"{folder}: a folder without config.json (it holds {holds}); allowed: {ALLOWED}")
    return _load_pretrained(name, str(folder), dtype)


def converted_folder(name: str, home: str | os.PathLike[str] | None = None, *, progress: bool = False) -> Path:
    """Give the safetensors folder of an embedded model, fetching and converting it first where needed.

    Raises
    ------
    ModelError
        The model cannot be fetched, read or written.
    """
    # The weights' hash is in the name, so a new pin never meets an old folder.
    folder = model_home(home) / "converted" / f"{name}-{EMBEDDED[name].members[0].sha256[:12]}"
    if (folder / "config.json").is_file():
        return folder
    source = fetch(name, home, progress=progress)
    parts: tuple[Any, ...]
    if (source / "model.bin").is_file():
        parts = load_ctranslate2_whisper(source)
    else:
        parts = load_gguf(source / EMBEDDED[name].members[0].name)
    try:
        _save(parts, folder)
    except OSError as error:
        raise ModelError(f"{name}: cannot write {folder}: {error}") from error
    return folder


def _save(parts: tuple[Any, ...], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        finished = Path(scratch) / "finished"
        with _without_progress_bars():
            for part in parts:
                part.save_pretrained(finished)
        replace_folder(finished, folder)


def _load_pretrained(name: str, source: str, dtype: torch.dtype, *, local_only: bool = True) -> Loaded:
    """Load with transformers from a folder or a hub name, with every failure as one ``ModelError``."""
    from transformers import AutoConfig, AutoProcessor

    options = {"local_files_only": local_only}
    try:
        with _without_progress_bars():
            model_type = model_class(AutoConfig.from_pretrained(source, **options))
            model = model_type.from_pretrained(source, dtype=dtype, **options).eval()
            reader = AutoProcessor.from_pretrained(source, **options)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{name!r} cannot be loaded: {first_line}; allowed: {ALLOWED}") from error
    return _with_reader(name, model, reader)


def _with_reader(name: str, model: Any, reader: Any) -> Loaded:
    """Sort what ``AutoProcessor`` gave: a tokenizer for a model of text alone, else a processor that holds one."""
    if callable(getattr(reader, "decode", None)) and not hasattr(reader, "tokenizer"):
        return Loaded(name, model, reader)
    tokenizer = getattr(reader, "tokenizer", None)
    if tokenizer is None:
        raise ModelError(f"{name!r} has no tokenizer, only a {type(reader).__name__}; allowed: {ALLOWED}")
    return Loaded(name, model, tokenizer, getattr(reader, "feature_extractor", None), reader)


def model_class(config: Any) -> Any:
    """Give the class that a configuration names, or the causal language model of its type.

    Raises
    ------
    ModelError
        The class is not one that generates text.
    """
    import transformers

    named = (getattr(config, "architectures", None) or [None])[0]
    if named is None:
        return transformers.AutoModelForCausalLM
    found = getattr(transformers, named, None)
    if found is None or not found.can_generate():
        raise ModelError(f"its class {named!r} is none of transformers' classes that generate text")
    return found


def is_hub_reachable(name: str) -> bool:
    """Ask the hub for a model once, without the retries that a download makes, and tell whether it answered.

    Raises
    ------
    ModelError
        The hub answers that it has no such model.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except RepositoryNotFoundError as error:
        raise ModelError(f"{name!r}: the hub has no such model, or not for you; allowed: {ALLOWED}") from error
    except HfHubHTTPError:
        return True
    except Exception:
        return False
    return True


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
