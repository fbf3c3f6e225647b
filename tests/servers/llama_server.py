"""llama.cpp's own server, from the wheel xllamacpp: `llama_server.py GGUF PORT SLOTS TOKENS NAME`.

TOKENS is the size of the KV cache, which all slots share; NAME is the model's, or empty: its path.
"""

import signal
import sys

import xllamacpp  # type: ignore[import-not-found]

path, port, slots, tokens, name = sys.argv[1:]
parameters = xllamacpp.CommonParams()
parameters.model.path = path
if name:
    parameters.model_alias = {name}
parameters.hostnames = ["127.0.0.1"]
parameters.port = int(port)
parameters.n_parallel = int(slots)
parameters.n_ctx = int(tokens)
parameters.kv_unified = True
parameters.endpoint_metrics = True
# Several would spin at each layer, and beside other programs take ten times as long.
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(parameters)
signal.pause()
