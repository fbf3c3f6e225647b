"""One engine in a process and an environment of its own: `python -P worker.py FD CLASS OPTIONS`.

Serves requests from the connection with file descriptor FD: sends {"ready": versions} first, then
{"seconds": ...} or {"error": ...} for each request. Each class imports its engine when it is
created, since the environments of the peers have nothing of the others and nothing of ours. Its
method `measure` does the work of a request and returns its seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main(descriptor: int, kind: str, options: dict[str, Any]) -> None:
    """Serve until the other end is closed."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        worker = globals()[kind](**options)
    except Exception as error:
        connection.send(_failure(error))
        sys.exit(1)
    connection.send({"ready": worker.versions})
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            reply = {"seconds": worker.measure(**request)}
        except Exception as error:
            reply = _failure(error)
        connection.send(reply)


def _failure(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}


class Own:
    """The own engine, and the bound that its matrix products set; `slots`: of a request."""

    def __init__(self, model: str, threads: int, slots: int) -> None:
        import torch

        from generator_service.engine.engine import Engine
        from generator_service.engine.model import CausalLM
        from generator_service.engine.thread import EngineThread
        from specrej_models.probe import examine

        torch.set_num_threads(threads)
        self.versions = {"specrej": version("specrej"), "torch": torch.__version__}
        self._model = CausalLM.load(examine(Path(model)), "cpu")
        self._engine = EngineThread(Engine(self._model, slots))
        self._engine.start()

    def measure(
        self, n: int = 0, prompt_ids: Sequence[int] = (), new_tokens: int = 0, gemm_bound: int = 0
    ) -> float:
        """Seconds for n candidates, or for the products of one step of `gemm_bound` rows."""
        from benchmarks.engine import generate, products_seconds

        if gemm_bound:
            return products_seconds(self._model.products, gemm_bound)
        started = time.perf_counter()
        generate(self._engine, prompt_ids, n, new_tokens)
        return time.perf_counter() - started


class Transformers:
    """transformers' `generate` with num_return_sequences, float32."""

    def __init__(self, model: str, threads: int) -> None:
        import torch
        import transformers

        self._torch, self._transformers = torch, transformers
        torch.set_num_threads(threads)
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        causal = transformers.AutoModelForCausalLM
        self._model = causal.from_pretrained(
            model, dtype=torch.float32, local_files_only=True
        ).eval()

    def measure(self, n: int, prompt_ids: list[int], new_tokens: int) -> float:
        """Seconds for n samples of the prompt."""
        started = time.perf_counter()
        output = self._samples(n, prompt_ids, new_tokens)
        seconds = time.perf_counter() - started
        assert output.shape == (n, new_tokens), output.shape
        return seconds

    def _samples(self, n: int, prompt_ids: list[int], new_tokens: int) -> Any:
        """Token ids, [n, new_tokens]."""
        config = self._transformers.GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            num_return_sequences=n,
            eos_token_id=None,
            pad_token_id=0,
        )
        # generate() takes what its config leaves out, such as the end token, from the model's.
        self._model.generation_config = config
        ids = self._torch.tensor([prompt_ids])
        mask = self._torch.ones_like(ids)
        with self._torch.inference_mode():
            output = self._model.generate(ids, attention_mask=mask, generation_config=config)
        return output[:, len(prompt_ids) :]


class VLLM:
    """vLLM: its CPU build in float32, on CUDA bfloat16; `vllm_options`: more engine arguments.

    No request is longer than `context_tokens`.
    """

    def __init__(
        self, model: str, threads: int, context_tokens: int, vllm_options: Mapping[str, Any]
    ) -> None:
        import torch
        import vllm

        self._vllm = vllm
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        # Samples share whole blocks of their prompt, and each computes the rest of it. 32 is the
        # least on CPUs; with their default of 128 nothing of a 40-token prompt is shared.
        of_device: dict[str, Any] = {"dtype": "float32", "block_size": 32}
        if on_cuda := torch.cuda.is_available():
            of_device = {"dtype": "bfloat16"}
        self._llm = vllm.LLM(
            model=model,
            max_model_len=context_tokens,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            seed=0,
            **{**of_device, **vllm_options},
        )
        assert on_cuda or torch.get_num_threads() == threads, torch.get_num_threads()

    def measure(self, n: int, prompt_ids: list[int], new_tokens: int) -> float:
        """Seconds for n samples of the prompt."""
        sampling = self._vllm.SamplingParams(
            n=n,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        prompt = {"prompt_token_ids": prompt_ids}
        started = time.perf_counter()
        (answer,) = self._llm.generate([prompt], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        lengths = [len(sample.token_ids) for sample in answer.outputs]
        assert lengths == [new_tokens] * n, lengths
        return seconds


class LlamaCpp:
    """llama.cpp through its C interface; each request has a context, and a KV store, of its own.

    Few rows use the 4-bit weights, more rows the same weights unpacked to float32, with which
    products of many rows are faster.
    """

    _PACKED_UP_TO_ROWS = 7

    def __init__(self, packed: str, unpacked: str, threads: int) -> None:
        import llama_cpp

        self._ll: Any = llama_cpp
        self.versions = {
            "llama_cpp_python": llama_cpp.__version__,
            "llama.cpp": llama_cpp.llama_version().decode(),
        }
        llama_cpp.llama_backend_init()
        self._unpack(Path(packed), Path(unpacked))
        self._packed, self._unpacked = self._load(packed), self._load(unpacked)
        self._threads = threads
        self._samplers = ThreadPoolExecutor(threads)

    def measure(self, n: int, prompt_ids: list[int], new_tokens: int) -> float:
        """Seconds for n samples of the prompt, without creating the context."""
        with self._context(n, len(prompt_ids), new_tokens) as context, self._chains(n) as chains:
            started = time.perf_counter()
            rows = self._generate(context, chains, prompt_ids, new_tokens)
            seconds = time.perf_counter() - started
        assert [len(tokens) for tokens in rows] == [new_tokens] * n, list(map(len, rows))
        return seconds

    def _generate(
        self, context: Any, chains: list[Any], prompt_ids: list[int], new_tokens: int
    ) -> list[list[int]]:
        """Compute the prompt once, as sequence 0; the other sequences start as its copies."""
        ll, size = self._ll, len(prompt_ids)
        self._decode(context, prompt_ids, range(size), [0] * size, [False] * (size - 1) + [True])
        memory, rows = ll.llama_get_memory(context), range(len(chains))
        for row in rows[1:]:
            ll.llama_memory_seq_cp(memory, 0, row, -1, -1)
        newest = self._sample(context, chains, [-1] * len(chains))
        generated = [[token] for token in newest]
        for position in range(size, size + new_tokens - 1):
            self._decode(context, newest, [position] * len(rows), rows, [True] * len(rows))
            newest = self._sample(context, chains, rows)
            for tokens, token in zip(generated, newest, strict=True):
                tokens.append(token)
        return generated

    def _sample(self, context: Any, chains: list[Any], outputs: Any) -> list[int]:
        """One token per sequence by its own chain, on all cores."""
        self._ll.llama_get_logits_ith(context, -1)  # sorts the outputs; later calls only read
        sample = self._ll.llama_sampler_sample
        return list(self._samplers.map(lambda c, out: sample(c, context, out), chains, outputs))

    @contextmanager
    def _context(self, n: int, prompt_tokens: int, new_tokens: int) -> Iterator[Any]:
        """A context with one KV store for all sequences if the prompt dominates, since it stays in
        the processor's caches; else one store each, so that no sequence skips others' tokens."""

        def padded(tokens: int) -> int:  # the KV store is allocated in blocks of 256
            return -(-tokens // 256) * 256

        ll, is_shared = self._ll, n * new_tokens <= 16 * prompt_tokens
        params = ll.llama_context_default_params()
        params.kv_unified = is_shared
        each = n * padded(prompt_tokens + new_tokens)
        params.n_ctx = padded(prompt_tokens + n * new_tokens) if is_shared else each
        params.n_batch = params.n_ubatch = max(512, prompt_tokens, n)
        params.n_seq_max = n
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        model = self._packed if n <= self._PACKED_UP_TO_ROWS else self._unpacked
        context = ll.llama_init_from_model(model, params)
        if not context:
            most = ll.llama_max_parallel_sequences()
            raise RuntimeError(f"no context for {n} sequences (the most is {most}): see the log")
        try:
            yield context
        finally:
            ll.llama_free(context)

    @contextmanager
    def _chains(self, n: int) -> Iterator[list[Any]]:
        """A sampler chain per sequence: temperature 1, then a draw from the whole vocabulary."""
        ll, chains = self._ll, []
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

    def _decode(
        self, context: Any, tokens: list[int], positions: Any, sequences: Any, outputs: Any
    ) -> None:
        ll, size = self._ll, len(tokens)
        ids: list[Any] = [(ctypes.c_int32 * 1)(sequence) for sequence in sequences]
        batch = ll.llama_batch()  # its ctypes arrays live as long as it does
        batch.n_tokens = size
        batch.token = (ctypes.c_int32 * size)(*tokens)
        batch.pos = (ctypes.c_int32 * size)(*positions)
        batch.n_seq_id = (ctypes.c_int32 * size)(*[1] * size)
        batch.seq_id = (ctypes.POINTER(ctypes.c_int32) * size)(*ids)
        batch.logits = (ctypes.c_int8 * size)(*outputs)
        if code := ll.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode: {code}")
        ll.llama_synchronize(context)

    def _unpack(self, packed: Path, unpacked: Path) -> None:
        """Write the weights as float32, once."""
        if unpacked.exists():
            return
        params = self._ll.llama_model_quantize_default_params()
        # 0 is float32 among llama.cpp's file types and among ggml's tensor types.
        params.ftype = params.output_tensor_type = params.token_embedding_type = 0
        params.allow_requantize = True
        scratch = unpacked.with_suffix(".part")
        names = str(packed).encode(), str(scratch).encode()
        if code := self._ll.llama_model_quantize(*names, ctypes.byref(params)):
            raise RuntimeError(f"llama_model_quantize: {code}")
        scratch.replace(unpacked)

    def _load(self, path: str) -> Any:
        params = self._ll.llama_model_default_params()
        model = self._ll.llama_model_load_from_file(path.encode(), params)
        if not model:
            raise RuntimeError(f"cannot load {path}")
        return model


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
