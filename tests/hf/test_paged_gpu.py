"""What a GPU runs of the paged engine, as far as a machine without one can tell.

The Triton kernels run in Triton's interpreter, and are compiled for GPUs that are not here. CUDA
graphs are recorded operations, replayed on the memory that they were recorded on.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.engines import boot
from headway.engines.models import prepare
from headway.engines.models.loading import load
from headway.engines.paged import attention as attention_package
from headway.engines.paged import weights as paged_weights
from headway.engines.paged.attention.choose import choose
from headway.engines.paged.attention.plain import Plain
from headway.engines.paged.attention.sdpa import Sdpa
from headway.engines.paged.batch import Batch, RowPlan, build
from headway.engines.paged.graphs import GraphedDecode, buckets
from headway.engines.paged.model import Decoder, new_cache
from headway.engines.paged.ops import TorchOps

TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not TRITON, reason="triton is not installed here")
PACKAGE = "headway.engines.paged.attention"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: other threads would only spin beside them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ModuleType]:
    """Give the Triton kernels as its interpreter runs them."""
    if not TRITON:
        pytest.skip("triton is not installed here")
    with pytest.MonkeyPatch.context() as patch:
        # Triton decides while it is imported, its own functions included.
        patch.setenv("TRITON_INTERPRET", "1")
        for name in [*sys.modules]:
            if name == "triton" or (name.startswith("triton.") and "._C" not in name):
                patch.delitem(sys.modules, name)
        patch.delitem(sys.modules, f"{PACKAGE}.triton_paged", raising=False)
        interpreter = importlib.import_module("triton.runtime.interpreter")
        plain_dot = interpreter.InterpreterBuilder.create_dot

        def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
            # The interpreter keeps bfloat16 as 16-bit whole numbers, and multiplies those.
            return plain_dot(self, widened(a), widened(b), *rest)

        def widened(handle: Any) -> Any:
            if handle.dtype.scalar.name != "bf16":
                return handle
            data = (handle.data.astype("uint32") << 16).view("float32")
            return interpreter.TensorHandle(data, interpreter.tl.float32)

        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield importlib.import_module(f"{PACKAGE}.triton_paged")
    sys.modules.pop(f"{PACKAGE}.triton_paged", None)


@pytest.fixture
def attention(interpreted: ModuleType) -> Any:
    return interpreted.TritonPaged(8)


# ---- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Pass:
    """A pass over a cache, and the same cache with NaN wherever none of its rows may look."""

    q: Tensor
    clean: tuple[Tensor, Tensor]
    dirty: tuple[Tensor, Tensor]
    batch: Batch
    scale: float


def a_pass(
    rows: Sequence[tuple[int, int]], block_size: int, kv_heads: int, group: int, head_dim: int,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Pass:  # fmt: skip
    """Lay out rows of (context before, tokens); those that decode come first."""
    random = torch.Generator().manual_seed(seed)
    needs = [-(-(before + tokens) // block_size) for before, tokens in rows]
    num_blocks = sum(needs) + 3
    free = torch.randperm(num_blocks - 1, generator=random).add(1).tolist()
    plans = []
    for (before, tokens), need in zip(rows, needs, strict=True):
        table = [free.pop() for _ in range(need)]
        plans.append(RowPlan([0] * tokens, before, table, ends=True))
    batch = build(plans, block_size)
    sizes = (num_blocks, block_size, kv_heads, head_dim)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for plan, length in zip(plans, batch.lengths, strict=True):
        for place in range(length):
            used[plan.block_table[place // block_size], place % block_size] = True
    clean, dirty = [], []
    for _ in range(2):
        cache = torch.randn(sizes, generator=random).to(dtype)
        clean.append(cache.masked_fill(~used[..., None, None], 0.0))
        dirty.append(cache.masked_fill(~used[..., None, None], float("nan")))
    # A view as a fused matrix gives it: its rows lie further apart than they are long.
    wide = torch.randn(batch.num_tokens, kv_heads * group * head_dim + 32, generator=random)
    q = wide.to(dtype)[:, : kv_heads * group * head_dim].unflatten(-1, (-1, head_dim))
    return Pass(q, tuple(clean), tuple(dirty), batch, head_dim**-0.5)  # type: ignore[arg-type]


def check(attention: Any, one: Pass, tolerance: float = 2e-6) -> None:
    wanted = Plain()(one.q, *one.clean, one.batch, one.scale)
    before = [cache.clone() for cache in one.dirty]
    made = attention(one.q, *one.dirty, one.batch, one.scale)
    assert made.shape == one.q.shape
    assert made.dtype == one.q.dtype
    torch.testing.assert_close(made, wanted, atol=tolerance, rtol=tolerance)
    for cache, old in zip(one.dirty, before, strict=True):
        assert torch.equal(cache.isnan(), old.isnan())
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    block_size = draw(st.sampled_from([4, 16, 24]))
    # Where blocks and a kernel's tiles of 16 to 64 keys begin and end.
    edges = st.sampled_from([1, 2, 15, 16, 17, 31, 33, 47, 48, 63, 64, 65, 95, 97, 130])
    decodes = draw(st.lists(edges, max_size=3))
    chunks = draw(st.lists(st.tuples(st.sampled_from([0, 1, 16, 33, 63]), edges), max_size=2))
    rows = [(length - 1, 1) for length in decodes] + [(b, n) for b, n in chunks if n > 1]
    return a_pass(
        rows or [(0, 1)],
        block_size,
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 3, 4, 7])),
        draw(st.sampled_from([16, 32, 64])),
        seed=draw(st.integers(0, 99)),
    )


def test_it_is_plain_attention_and_looks_at_no_other_slot(attention: Any):
    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(passes())
    def run(one: Pass) -> None:
        check(attention, one)

    run()


@pytest.mark.parametrize("head_dim", [128, 256])
def test_wide_heads(attention: Any, head_dim: int):
    check(attention, a_pass([(40, 1), (64, 1), (20, 9)], 16, 1, 6, head_dim))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions(attention: Any, dtype: torch.dtype):
    check(attention, a_pass([(150, 1), (2, 1), (70, 50)], 16, 2, 3, 64, dtype), tolerance=2e-2)


@needs_triton
def test_a_long_context_is_split_and_combined(interpreted: ModuleType):
    # 300 tokens are five tiles of 64 keys: two programs have three and two, four have two or one.
    one = a_pass([(299, 1)], 16, 1, 2, 64)
    for processors, splits in ((0, 1), (1, 2), (16, 4)):
        assert interpreted.num_splits(1, 5, processors) == splits
        check(interpreted.TritonPaged(processors), one)
    wide = replace(one.batch, block_tables=torch.full((1, 200), 2**30, dtype=torch.int32))
    wide.block_tables[:, : one.batch.block_tables.shape[1]] = one.batch.block_tables
    assert interpreted.num_splits(1, 50, 64) == 32  # of which five have something to read
    made = interpreted.TritonPaged(64)(one.q, *one.dirty, wide, one.scale)
    torch.testing.assert_close(made, Plain()(one.q, *one.clean, one.batch, one.scale))


@pytest.mark.parametrize("processors", [1, 108, 132])
def test_splits_fill_the_device_and_no_more(processors: int, request: pytest.FixtureRequest):
    num_splits = request.getfixturevalue("interpreted").num_splits
    for programs in range(1, 600):
        for tiles in (1, 2, 3, 7, 64, 4096):
            splits = num_splits(programs, tiles, processors)
            assert splits in (1, 2, 4, 8, 16, 32, 64)
            assert splits == 1 or (splits <= tiles and splits * programs <= 2 * processors)


@pytest.mark.parametrize("rows", [1, 5])
def test_padded_rows_are_finite_and_the_host_is_not_asked(attention: Any, rows: int):
    """What a graph relies on: lengths on the host say nothing, tables end in garbage."""
    one = a_pass([(17 * row + 3, 1) for row in range(rows)], 16, 2, 3, 32)
    padded, width = rows + 3, one.batch.block_tables.shape[1] + 4
    tables = torch.zeros(padded, width, dtype=torch.int32)
    tables[:rows, : width - 4] = one.batch.block_tables
    for row, length in enumerate(one.batch.lengths):
        tables[row, -(-length // 16) :] = 2**30
    lens = torch.zeros(padded, dtype=torch.int32)
    lens[:rows] = one.batch.context_lens
    batch = replace(
        one.batch,
        block_tables=tables,
        context_lens=lens,
        starts=tuple(range(padded + 1)),
        num_decodes=padded,
        lengths=(-1,) * padded,
    )
    assert attention.capturable
    q = torch.cat([one.q, torch.full((3, *one.q.shape[1:]), float("nan"))])
    made = attention(q, *one.dirty, batch, one.scale)
    wanted = Plain()(one.q, *one.clean, one.batch, one.scale)
    torch.testing.assert_close(made[:rows], wanted)
    assert torch.equal(made[rows:], torch.zeros_like(made[rows:]))


@needs_triton
def test_the_kernels_compile_for_gpus(tmp_path: Path):
    """Triton brings its own compiler; what is too large for a GPU's shared memory is seen too."""
    program = tmp_path / "kernels_for_gpus.py"
    program.write_text(COMPILE, encoding="utf-8")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(boot.ENGINES / "boot.py"), "kernels_for_gpus"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = [int(line) for line in done.stdout.split()]
    assert len(shared) == 4
    assert max(shared) <= 99 * 1024  # the least of Ampere, Ada, Hopper and Blackwell


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from headway.engines.paged.attention import triton_paged as paged

def compile(kernel, signature, sizes, capability, stages, warps):
    names = kernel.arg_names
    signature = dict(zip(names, signature)) | {name: "constexpr" for name in sizes}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in sizes.items()},
        {(names.index(k),): [["tt.divisibility", 16]] for k in ("q", "keys", "values", "out")
         if k in names})
    target, options = GPUTarget("cuda", capability, 32), {"num_stages": stages, "num_warps": warps}
    print(triton.compile(source, target=target, options=options).metadata.shared)

rows = ["*i32"] * 3 + ["fp32", "i32", "i32"]
sizes = {"block_size": 16, "kv_heads": 2, "group": 7, "head_dim": 128, "tile_keys": 64}
decode = sizes | {"tokens": 1, "lines": 16, "splits": 8, "decode": True}
prompt = sizes | {"tokens": 18, "lines": 128, "splits": 1, "decode": False}
exact = prompt | {"tokens": 4, "lines": 32, "tile_keys": 32}
compile(paged._attend, ["*bf16"] * 3 + ["*fp32"] * 2 + rows, decode, 80, 5, 4)
compile(paged._attend, ["*bf16"] * 5 + rows, prompt, 90, 3, 8)
compile(paged._attend, ["*fp32"] * 5 + rows, exact, 80, 3, 4)
compile(paged._combine, ["*fp32", "*fp32", "*bf16", "*i32"],
    {"head_dim": 128, "tile_keys": 64, "splits": 64}, 80, 3, 4)
"""


# ---- which attention -----------------------------------------------------------------------------


def test_on_a_cpu():
    native = Plain()
    of = ("cpu", torch.bfloat16, 64, 16)
    assert isinstance(choose("plain", *of), Plain)
    assert isinstance(choose("sdpa", *of), Sdpa)
    assert choose("native", *of, native) is native
    assert choose("auto", *of, native) is native
    assert isinstance(choose("auto", *of), Sdpa)


@pytest.mark.parametrize(
    ("name", "head_dim", "said"),
    [
        ("native", 64, "compiled kernels, which are not here"),
        ("triton", 64, "triton needs a GPU, and the device is cpu"),
        ("best", 64, "auto, plain, sdpa, native, triton, not 'best'"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    name: str, head_dim: int, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=said):
        choose(name, "cpu", torch.float32, head_dim, 16)


def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """`auto` is Triton's where it can be had, and what any device has where not."""
    of = ("cuda", torch.bfloat16, 64, 256)
    module = SimpleNamespace(refusal=lambda *_: None, make=lambda _: SimpleNamespace(name="there"))
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.triton_paged", module)
    monkeypatch.setattr(attention_package, "triton_paged", module, raising=False)
    assert choose("auto", *of, Plain()).name == choose("triton", *of).name == "there"
    module.refusal = lambda *_: "no such heads"
    assert isinstance(choose("auto", *of, Plain()), Sdpa)
    with pytest.raises(ValueError, match="no such heads"):
        choose("triton", *of)
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.triton_paged", None)
    monkeypatch.delattr(attention_package, "triton_paged")
    with pytest.raises(ValueError, match="attention triton cannot be imported: "):
        choose("triton", *of)


@needs_triton
def test_what_triton_cannot_take(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("triton", "cpu", torch.float32, 64, 16).name == "triton"
    for head_dim in (8, 80, 96, 512):
        with pytest.raises(ValueError, match=f"not {head_dim}"):
            choose("triton", "cpu", torch.float32, head_dim, 16)


# ---- CUDA graphs ---------------------------------------------------------------------------------


class DeviceLengths(Plain):
    """Plain attention that asks the host for nothing, as a graph needs it."""

    name = "device_lengths"
    capturable = True

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        tables = batch.block_tables.long().clamp(0, len(keys) - 1)
        k, v = (cache[tables].flatten(1, 2) for cache in (keys, values))
        seen = torch.arange(k.shape[1])[None, None] < batch.context_lens[:, None, None]
        return self.attend(q[:, None], k, v, seen, scale)[:, 0].nan_to_num()


class Recorded(TorchDispatchMode):
    """A stand-in for a CUDA graph: operations, and the memory that they had."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host read a number"
        made = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, old in self.steps:
            made = func(*args, **kwargs)
            for new, place in zip(tree_leaves(made), tree_leaves(old), strict=True):
                if isinstance(new, Tensor) and new.data_ptr() != place.data_ptr():
                    place.copy_(new)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Let graphs be captured without a GPU; returns them in the order of their capture."""
    graphs: list[Recorded] = []

    @contextmanager
    def graph(one: Recorded, pool: object, stream: object) -> Iterator[None]:
        assert pool == "pool"
        graphs.append(one)
        with one:
            yield

    @contextmanager
    def stream(one: object) -> Iterator[None]:
        yield

    waiting = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "is_available": lambda: True,
        "CUDAGraph": Recorded,
        "graph": graph,
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda device: waiting,
        "stream": stream,
        "current_stream": lambda device: waiting,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return graphs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> paged_weights.Weights:
    folder = prepare("synthetic:tiny", tmp_path_factory.mktemp("models"))
    return paged_weights.read(load(folder, "float32", "cpu"), fused=True)


BLOCK, WIDTH, BLOCKS = 4, 12, 120


class Night:
    """Sequences that decode, each step once without padding and once as graphs have it."""

    def __init__(self, weights: paged_weights.Weights, attention: Any, capture: bool) -> None:
        self.ops, self.random = TorchOps(), torch.Generator().manual_seed(7)
        self.plain = Decoder(weights, self.ops, Plain())
        self.caches = [new_cache(weights.shape, BLOCKS, BLOCK, weights.embedding) for _ in range(2)]
        free = torch.randperm(BLOCKS - 1, generator=self.random).tolist()
        lengths = [1, 3, 4, 5, 8, 9, 2, 7, 16, 6, 4]
        self.tables = [[free.pop() for _ in range(WIDTH - row % 4)] for row in range(len(lengths))]
        self.ids = [self._invent(length) for length in lengths]
        plans = [
            RowPlan(ids, 0, table, True) for ids, table in zip(self.ids, self.tables, strict=True)
        ]
        for cache in self.caches:
            for plan in plans:  # one by one: a row of one token must not count as a decode
                hidden = self.plain.hidden(build([plan], BLOCK), cache.layers())
            assert hidden.isfinite().all()
        for ids in self.ids:
            ids += self._invent(1)
        self.graphed = GraphedDecode(
            Decoder(weights, self.ops, attention), self.ops, attention, self.caches[1],
            max_rows=11, max_width=WIDTH, capture=capture,
        )  # fmt: skip

    def _invent(self, count: int) -> list[int]:
        return torch.randint(1, 200, (count,), generator=self.random).tolist()

    def soil(self) -> None:
        """Fill all buffers with what would be wrong if it were ever read."""
        for memory in (self.graphed._memory, self.graphed._staging):
            memory.fill_(0x3F)

    def step(self, rows: Sequence[int], device_ids: bool = False) -> None:
        plans = [
            RowPlan(self.ids[row][-1:], len(self.ids[row]) - 1, self.tables[row], True)
            for row in rows
        ]
        batch = build(plans, BLOCK)
        hidden = self.plain.hidden(batch, self.caches[0].layers())
        wanted = self.ops.argmax(self.plain.logits(hidden))
        self.soil()
        if device_ids:
            given = batch.ids.clone()
            made, padded = self.graphed(replace(batch, ids=torch.full_like(batch.ids, 5)), given)
        else:
            made, padded = self.graphed(batch)
        torch.testing.assert_close(padded, hidden, atol=1e-4, rtol=1e-4)
        assert made.tolist() == wanted.tolist()
        self.check_padding(len(rows))
        if len(rows) == 3:  # the same step again: it writes what is there
            self.soil()
            made = made.clone()
            torch.testing.assert_close(self.graphed(batch)[1], hidden, atol=1e-4, rtol=1e-4)
        for row, token in zip(rows, made.tolist(), strict=True):
            self.ids[row].append(token)

    def check_padding(self, rows: int) -> None:
        size = min(size for size in buckets(11) if size >= rows)
        _, padded = self.graphed._targets[size]
        assert padded.num_rows == padded.num_decodes == size
        for tensor, padding in (
            (padded.context_lens, 0),
            (padded.positions, 0),
            (padded.slots, BLOCKS * BLOCK - 1),
        ):
            assert (tensor[:rows] != padding).all()
            assert (tensor[rows:] == padding).all()

    def check_caches(self) -> None:
        """All but the reserved block is as without padding; what nobody wrote is as it was."""
        for plain, padded in zip(
            *((cache.keys, cache.values) for cache in self.caches), strict=True
        ):
            plain, padded = plain[:, :-1], padded[:, :-1]
            torch.testing.assert_close(padded, plain, atol=1e-4, rtol=1e-4)
            assert torch.equal(padded == 0, plain == 0)


ORDER = [[0], [1, 0], [4, 2, 9], [0, 1, 2, 3, 4], [10, 9, 8], [*range(11)], [*range(10)], [7], [3]]


@pytest.mark.parametrize(
    "name", ["plain", "sdpa", "device_lengths", pytest.param("triton", marks=needs_triton)]
)
def test_padded_steps_write_the_tokens_of_unpadded_ones(
    tiny: paged_weights.Weights, name: str, request: pytest.FixtureRequest
):
    if name == "triton":
        attention = request.getfixturevalue("interpreted").TritonPaged(8)
    else:
        attention = {"plain": Plain, "sdpa": Sdpa, "device_lengths": DeviceLengths}[name]()
    night = Night(tiny, attention, capture=False)
    order = ORDER[2:6] if name == "triton" else ORDER  # the interpreter is slow
    for place, rows in enumerate(order):
        night.step(rows, device_ids=place % 2 == 1)
    night.check_caches()


def test_replayed_steps_write_the_tokens_of_unpadded_ones(
    tiny: paged_weights.Weights, cuda: list[Recorded]
):
    night = Night(tiny, DeviceLengths(), capture=True)
    # The first operation of each looks the embeddings of its rows up.
    assert [one.steps[0][3].shape[0] for one in cuda] == [11, 8, 4, 2, 1]
    for place, rows in enumerate(ORDER):
        night.step(rows, device_ids=place % 2 == 1)
    night.check_caches()
    assert all(one.replays for one in cuda)
    assert sum(one.replays for one in cuda) == len(ORDER) + sum(len(rows) == 3 for rows in ORDER)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4, 7, 8, 9, 64, 65, 80, 96, 200, 256])
def test_buckets(max_rows: int):
    sizes = buckets(max_rows)
    assert sizes[-1] == max_rows
    assert list(sizes) == sorted(set(sizes))
    assert set(sizes[:-1]) <= {1, 2, 4, *range(8, 65, 8), *range(80, max_rows, 16)}
    if max_rows == 96:
        assert sizes == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96)


def test_what_a_graph_cannot_hold_is_refused(tiny: paged_weights.Weights):
    ops = TorchOps()
    cache = new_cache(tiny.shape, 4, BLOCK, tiny.embedding)

    def graphed(attention: Any, capture: bool) -> GraphedDecode:
        decoder = Decoder(tiny, ops, attention)
        return GraphedDecode(decoder, ops, attention, cache, 2, 2, capture)

    for attention in (Plain(), Sdpa()):
        with pytest.raises(ValueError, match=f"attention {attention.name} asks the host"):
            graphed(attention, capture=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="need a GPU"):
            graphed(DeviceLengths(), capture=True)
    step = graphed(Plain(), capture=False)
    for rows in (
        [RowPlan([1], 0, [0], True)] * 3,
        [RowPlan([1], 8, [0, 1, 2], True)],
        [RowPlan([1, 2], 0, [0], True)],
    ):
        with pytest.raises(ValueError, match="up to 2 decoding rows of up to 2 blocks"):
            step(build(rows, BLOCK))
