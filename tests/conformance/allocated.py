"""Starts vLLM in this process, as the generator does, and prints what it allocates as JSON.

python -m tests.conformance.allocated DIRECTORY SLOTS
"""

from __future__ import annotations

import json
import sys

from generator_service.settings import GeneratorSettings
from specrej_models.vllm_options import prepare_environment


def main(directory: str, slots: int) -> None:
    settings = GeneratorSettings(
        engine="vllm",
        model=directory,
        threads=1,
        kv_slots=slots,
        max_candidates=32,
        vllm_options={"enforce_eager": True, "dtype": "float32"},
    )
    prepare_environment(settings.threads)
    # Imported here: vLLM reads the environment when imported.
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from generator_service.stock.vllm import _arguments, _shape

    arguments = _arguments(settings, _shape(settings))
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    stores = [tensor.untyped_storage() for tensor in worker.model_runner.kv_caches]
    cache = engine.vllm_config.cache_config
    allocated = {
        "kv_bytes": sum({store.data_ptr(): store.nbytes() for store in stores}.values()),
        "blocks": cache.num_gpu_blocks,
        "block_tokens": cache.block_size,
    }
    print(json.dumps(allocated))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
