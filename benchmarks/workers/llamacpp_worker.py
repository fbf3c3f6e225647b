"""llama.cpp through its C interface.

Few rows use the 4-bit weights, more rows the same weights unpacked to float32, with which products
of many rows are faster.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp as ll

_PACKED_UP_TO_ROWS = 7
_UBATCH_TOKENS = 512
# The KV store is allocated in blocks of this size.
_CONTEXT_BLOCK_TOKENS = 256
_FLOAT32 = 0  # of llama.cpp's file types and of ggml's tensor types


class Worker:
    """Both forms of the weights; each request has a context, and so a KV store, of its own."""

    def __init__(self, packed: str, unpacked: str, threads: int) -> None:
        self.versions = {
            "llama_cpp_python": ll.__version__,
            "llama.cpp": ll.llama_version().decode(),
        }
        ll.llama_backend_init()
        _unpack(Path(packed), Path(unpacked))
        self._packed, self._unpacked = _load(packed), _load(unpacked)
        self._threads = threads
        self._samplers = ThreadPoolExecutor(threads)

    def measure(self, n: int, prompt_ids: list[int], new_tokens: int) -> float:
        """Seconds for n samples of the prompt, without creating the context."""
        with self._context(n, len(prompt_ids), new_tokens) as context, _chains(n) as chains:
            started = time.perf_counter()
            rows = self._generate(context, chains, prompt_ids, new_tokens)
            seconds = time.perf_counter() - started
        assert [len(tokens) for tokens in rows] == [new_tokens] * n, list(map(len, rows))
        return seconds

    def _generate(
        self, context: Any, chains: list[Any], prompt_ids: list[int], new_tokens: int
    ) -> list[list[int]]:
        """Compute the prompt once, as sequence 0; the other sequences start as its copies."""
        size = len(prompt_ids)
        reading = _batch(prompt_ids, range(size), [0] * size, [False] * (size - 1) + [True])
        _decode(context, reading)
        memory = ll.llama_get_memory(context)
        rows = range(len(chains))
        for row in rows[1:]:
            ll.llama_memory_seq_cp(memory, 0, row, -1, -1)
        newest = self._sample(context, chains, [-1] * len(chains))
        generated = [[token] for token in newest]
        for position in range(size, size + new_tokens - 1):
            _decode(context, _batch(newest, [position] * len(rows), rows, [True] * len(rows)))
            newest = self._sample(context, chains, rows)
            for tokens, token in zip(generated, newest, strict=True):
                tokens.append(token)
        return generated

    def _sample(self, context: Any, chains: list[Any], outputs: Any) -> list[int]:
        """One token per sequence by its own chain, on all cores."""
        ll.llama_get_logits_ith(context, -1)  # sorts the outputs; later calls only read
        return list(
            self._samplers.map(
                lambda chain, output: ll.llama_sampler_sample(chain, context, output),
                chains,
                outputs,
            )
        )

    @contextmanager
    def _context(self, n: int, prompt_tokens: int, new_tokens: int) -> Iterator[Any]:
        """A context with one KV store for all sequences if the prompt dominates, since it stays in
        the processor's caches; else one store each, so that no sequence skips others' tokens."""
        shared = n * new_tokens <= 16 * prompt_tokens
        params = ll.llama_context_default_params()
        params.kv_unified = shared
        if shared:
            params.n_ctx = _padded(prompt_tokens + n * new_tokens)
        else:
            params.n_ctx = n * _padded(prompt_tokens + new_tokens)
        params.n_batch = params.n_ubatch = max(_UBATCH_TOKENS, prompt_tokens, n)
        params.n_seq_max = n
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        model = self._packed if n <= _PACKED_UP_TO_ROWS else self._unpacked
        context = ll.llama_init_from_model(model, params)
        if not context:
            most = ll.llama_max_parallel_sequences()
            raise RuntimeError(f"no context for {n} sequences (the most is {most}): see the log")
        try:
            yield context
        finally:
            ll.llama_free(context)


def _unpack(packed: Path, unpacked: Path) -> None:
    """Write the weights as float32, once."""
    if unpacked.exists():
        return
    params = ll.llama_model_quantize_default_params()
    params.ftype = params.output_tensor_type = params.token_embedding_type = _FLOAT32
    params.allow_requantize = True
    scratch = unpacked.with_suffix(".part")
    code = ll.llama_model_quantize(
        str(packed).encode(), str(scratch).encode(), ctypes.byref(params)
    )
    if code:
        raise RuntimeError(f"llama_model_quantize: {code}")
    scratch.replace(unpacked)


def _load(path: str) -> Any:
    model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
    if not model:
        raise RuntimeError(f"cannot load {path}")
    return model


@contextmanager
def _chains(n: int) -> Iterator[list[Any]]:
    """A sampler chain per sequence: temperature 1, then a draw from the whole vocabulary."""
    chains = []
    for seed in range(n):
        chain = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params())
        ll.llama_sampler_chain_add(chain, ll.llama_sampler_init_temp(1.0))
        ll.llama_sampler_chain_add(chain, ll.llama_sampler_init_dist(seed))
        chains.append(chain)
    try:
        yield chains
    finally:
        for chain in chains:
            ll.llama_sampler_free(chain)


def _batch(tokens: list[int], positions: Any, sequences: Any, outputs: Any) -> Any:
    """A llama_batch; its ctypes arrays live as long as it does."""
    size = len(tokens)
    ids: list[Any] = [(ctypes.c_int32 * 1)(sequence) for sequence in sequences]
    batch = ll.llama_batch()
    batch.n_tokens = size
    batch.token = (ctypes.c_int32 * size)(*tokens)
    batch.pos = (ctypes.c_int32 * size)(*positions)
    batch.n_seq_id = (ctypes.c_int32 * size)(*[1] * size)
    batch.seq_id = (ctypes.POINTER(ctypes.c_int32) * size)(*ids)
    batch.logits = (ctypes.c_int8 * size)(*outputs)
    return batch


def _decode(context: Any, batch: Any) -> None:
    code = ll.llama_decode(context, batch)
    if code:
        raise RuntimeError(f"llama_decode: {code}")
    ll.llama_synchronize(context)


def _padded(tokens: int) -> int:
    return -(-tokens // _CONTEXT_BLOCK_TOKENS) * _CONTEXT_BLOCK_TOKENS
