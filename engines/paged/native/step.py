"""A whole pass in one call: token ids in, token ids out, no Python in between."""

from __future__ import annotations

from ctypes import addressof, byref, c_int64

import torch
from torch import Tensor

from headway.engines.paged.batch import Batch, Cache
from headway.engines.paged.native.kernels import check_tables
from headway.engines.paged.native.library import Layer, Library, Matrix, Model, Pass, check
from headway.engines.paged.native.packing import Packer
from headway.engines.paged.weights import Layer as LayerWeights
from headway.engines.paged.weights import Projection, Weights

COLUMNS = 32  # outputs that are packed together


class Step:
    """A bf16 model and its cache, as the native kernels pass them."""

    name = "native"

    def __init__(
        self, library: Library, weights: Weights, cache: Cache, packer: Packer | None = None
    ) -> None:
        """Pack the weights, those apart that `packer` has packed before.

        Raises ValueError where a weight or the cache is not bf16, or a size is odd.
        """
        self._library, self._weights, self._cache = library, weights, cache
        self._packer = packer or Packer(library)
        self._kept: list[Tensor] = []
        shape = weights.shape
        if shape.head_dim % 2 or shape.hidden_size % 2 or shape.mlp_size % 2:
            raise ValueError("the native step needs even sizes of head, hidden state and MLP")
        sizes = (shape.num_layers, cache.num_blocks, cache.block_size, shape.num_kv_heads)
        for part in (cache.keys, cache.values):
            check(part, torch.bfloat16, (*sizes, shape.head_dim), "the cache")
        self._layers = (Layer * shape.num_layers)(*(self._layer(one) for one in weights.layers))
        angles = (shape.context_length, shape.head_dim // 2)
        for table in (weights.cos, weights.sin):
            check(table, torch.float32, angles, "the angles")
        self._model = Model(
            layers=self._layers,
            embedding=self._pointer(weights.embedding, (shape.vocab_size, shape.hidden_size)),
            norm=self._pointer(weights.norm, (shape.hidden_size,)),
            cos=weights.cos.data_ptr(),
            sin=weights.sin.data_ptr(),
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            head=self._matrix(weights.head, None),
            num_layers=shape.num_layers,
            hidden=shape.hidden_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            mlp=shape.mlp_size,
            context=shape.context_length,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            epsilon=shape.norm_epsilon,
            scale=shape.scale,
        )

    def __call__(self, batch: Batch, want_hidden: bool = False) -> Tensor:
        """Pass a batch, decoding rows or prompts or both, and fill the cache.

        Returns the next ids [S] int64 of the tokens that are asked for, each the first of its
        largest logits, or with `want_hidden` what the head would multiply, [S, hidden_size].
        Raises ValueError for a pass that names what is not there.
        """
        passed = self._pass(batch)
        asked = len(batch.last)
        made = torch.empty(asked, dtype=torch.int64)
        if want_hidden:
            made = torch.empty(asked, self._weights.shape.hidden_size, dtype=torch.bfloat16)
        done = self._library.run_pass(
            byref(self._model),
            byref(passed),
            torch.get_num_threads(),
            None if want_hidden else made.data_ptr(),
            made.data_ptr() if want_hidden else None,
        )
        if not done:
            raise ValueError(
                "the pass names what is not there: an id, position, slot, block or place"
            )
        return made

    def _pass(self, batch: Batch) -> Pass:
        """Return the batch as C reads it; what the numbers in it say is looked at there."""
        check_tables(batch, self._cache.block_size)
        tokens, asked, tables = batch.num_tokens, len(batch.last), batch.block_tables
        starts = (c_int64 * len(batch.starts))(*batch.starts)
        passed = Pass(
            tokens=tokens,
            rows=batch.num_rows,
            asked=asked,
            width=tables.shape[1],
            ids=check(batch.ids, torch.int64, (tokens,), "ids").data_ptr(),
            positions=check(batch.positions, torch.int64, (tokens,), "positions").data_ptr(),
            slots=check(batch.slots, torch.int64, (tokens,), "slots").data_ptr(),
            starts=addressof(starts),
            last=check(batch.last, torch.int64, (asked,), "last").data_ptr(),
            tables=tables.data_ptr(),
            lengths=batch.context_lens.data_ptr(),
        )
        passed.kept = starts  # C has only its address
        return passed

    def _layer(self, layer: LayerWeights) -> Layer:
        shape = self._weights.shape
        hidden, dim = (shape.hidden_size,), (shape.head_dim,)
        qkv = layer.qkv.packed(self._matrix)
        gate, up = self._gate_and_up(layer.gate_up)
        return Layer(
            input_norm=self._pointer(layer.input_norm, hidden),
            post_norm=self._pointer(layer.post_norm, hidden),
            q_norm=None if layer.q_norm is None else self._pointer(layer.q_norm, dim),
            k_norm=None if layer.k_norm is None else self._pointer(layer.k_norm, dim),
            qkv=(Matrix * 3)(*qkv),
            out=layer.out.packed(self._matrix)[0],
            gate=gate,
            up=up,
            down=layer.down.packed(self._matrix)[0],
            qkv_parts=len(qkv),
        )

    def _gate_and_up(self, gate_up: Projection) -> tuple[Matrix, Matrix]:
        """Return both; of one packed matrix they are halves where packing keeps them apart."""
        if len(gate_up.weights) == 2:
            gate, up = (self._matrix(weight, None) for weight in gate_up.weights)
            return gate, up
        n, (both,) = self._weights.shape.mlp_size, gate_up.weights
        if n % COLUMNS:
            return self._matrix(both[:n], None), self._matrix(both[n:], None)
        whole = self._matrix(both, None)
        size = n * whole.k * both.element_size()
        return Matrix(whole.packed, None, n, whole.k), Matrix(whole.packed + size, None, n, whole.k)

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        return self._packer.pack(weight, bias).matrix

    def _pointer(self, tensor: Tensor, shape: tuple[int, ...]) -> int:
        self._kept.append(tensor)
        return int(check(tensor, torch.bfloat16, shape, "a weight").data_ptr())
