"""Building the kernels: once, anywhere, and never a crash where it cannot be."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from headway.engines.paged import native
from headway.engines.paged.attention.plain import Plain
from headway.engines.paged.batch import RowPlan
from headway.engines.paged.batch import build as build_batch
from headway.engines.paged.native import build, kernels
from headway.engines.paged.native.library import Library

LIBRARY, REASON = native.available()
needs_compiler = pytest.mark.skipif(LIBRARY is None, reason=str(REASON))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    return tmp_path


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make $CXX a shell script."""
    file = folder / "my_compiler"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("CXX", str(file))


def test_no_compiler_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no_such_compiler")
    built = build.build(build.FLAGS)
    assert built.library is None
    assert built.reason == "no C++ compiler was found (looked for no_such_compiler)"


def test_a_failure_is_its_last_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = '[ "$1" = --version ] && echo 1.0 && exit'
    compiler(home, monkeypatch, f"{version}\necho first >&2; echo unknown flag >&2; exit 1")
    built = build.build(build.FLAGS)
    assert built.library is None
    assert str(built.reason).endswith("could not compile the native kernels: unknown flag")
    assert not list((home / "native").iterdir())


def test_what_is_no_library_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = 'for last; do :; done; [ "$1" = --version ] || echo text > "$last"'
    compiler(home, monkeypatch, write)
    assert "could not be built or loaded" in str(build.build(build.FLAGS).reason)


@needs_compiler
def test_torch_and_the_kernels_share_their_threads() -> None:
    """Two copies of OpenMP would be two sets of threads that wait for each other's processors."""
    maps = Path("/proc/self/maps").read_text()
    found = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "omp5" in line}
    assert len(found) == 1


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of that kind")
def test_a_processor_without_bf16_gets_the_same(home: Path) -> None:
    """Built twice, it is compiled once; and its fp32 arithmetic agrees with torch."""
    flags = tuple("-march=x86-64-v3" if flag == "-march=native" else flag for flag in build.FLAGS)
    built = build.build(flags)
    assert built.library is not None, built.reason
    (file,) = (home / "native").iterdir()
    before = file.stat().st_mtime_ns
    assert build.build(flags).library is not None
    assert file.stat().st_mtime_ns == before
    library = Library(built.library)
    assert not library.fast_bf16
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 70, generator=generator).bfloat16() for n in (9, 45))
    product = kernels.PackedLinear(kernels.Packer(library), weight, None)(x)
    torch.testing.assert_close(product, x @ weight.T, rtol=2.0**-7, atol=1e-3)
    keys, values = (torch.randn(5, 16, 2, 40, generator=generator).bfloat16() for _ in range(2))
    batch = build_batch([RowPlan([1], 19, [3, 1], True), RowPlan([1] * 9, 25, [0, 2, 4], True)], 16)
    q = torch.randn(10, 6, 40, generator=generator).bfloat16()
    wanted = Plain()(q.float(), keys.float(), values.float(), batch, 0.2)
    found = kernels.NativeAttention(library)(q, keys, values, batch, 0.2)
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0.02)
