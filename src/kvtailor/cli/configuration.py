"""The configuration of a model by name, without its weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvtailor.errors import ModelError


def load_config(name: str, *, progress: bool = False) -> Any:
    """Read the configuration of whatever ``kvtailor.models.load.load`` takes.

    An embedded model is fetched at its first use. Of other formats than folders and Llama GGUF files the weights are
    read too, for want of a configuration of their own.

    Parameters
    ----------
    name : an embedded model, a folder with config.json, a .gguf file, or a hub name.
    progress : show a line while an embedded model is fetched.

    Raises
    ------
    ModelError
        If the name is none of these, or what it names cannot be read.
    """
    from kvtailor.models.fetch import EMBEDDED
    from kvtailor.models.gguf import is_read_here, llama_config, read_header
    from kvtailor.models.load import HUB_NAME, converted_folder, load

    if name in EMBEDDED:
        return _from_transformers(name, str(converted_folder(name, progress=progress)), local=True)
    path = Path(name).expanduser()
    if (path / "config.json").is_file() and not (path / "model.bin").is_file():
        return _from_transformers(name, str(path), local=True)
    if path.is_file() or path.suffix.lower() == ".gguf":
        header = read_header(path)
        return llama_config(header) if is_read_here(header) else load(name).model.config
    if path.is_dir() or not HUB_NAME.fullmatch(name):
        return load(name).model.config
    return _from_hub(name)


def _from_hub(name: str) -> Any:
    from kvtailor.models.load import ALLOWED, is_hub_reachable

    if is_hub_reachable(name):
        return _from_transformers(name, name, local=False)
    try:
        return _from_transformers(name, name, local=True)
    except ModelError:
        raise ModelError(
            f"{name!r}: no such path, not in the hub's cache, and the hub is not reachable; allowed: {ALLOWED}"
        ) from None


def _from_transformers(name: str, source: str | os.PathLike[str], *, local: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, local_files_only=local)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{name!r}: the configuration cannot be read: {first_line}") from error


def on_meta(name: str, config: Any) -> Any:
    """The model of a configuration without memory for its weights, to ask what it is.

    Raises
    ------
    ModelError
        If it is no model that generates text, or cannot be built from the configuration.
    """
    import torch

    from kvtailor.models.load import model_class

    try:
        with torch.device("meta"):
            found = model_class(config)
            return found(config) if hasattr(found, "forward") else found.from_config(config)
    except ModelError as error:
        raise ModelError(f"{name!r}: {error}") from error
    except Exception as error:
        raise ModelError(f"{name!r}: no model can be built from its configuration: {error}") from error
